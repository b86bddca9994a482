/* The state of the page, which its address holds (after the `#`), so that a link gives the same view. */

const FIELDS = ["view", "run", "x", "smooth", "log", "metric", "of", "iteration", "order", "low", "high", "shortest",
  "longest", "text", "where", "id", "colour", "beside"];
const VIEWS = ["curves", "answers", "config"];
const OF_ANSWERS = ["of", "iteration", "order", "low", "high", "shortest", "longest", "text", "where", "id"];

/** The state that the address holds now: `runs` are names in order, everything else is a text or "". */
export function read() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const state = Object.fromEntries(FIELDS.map(field => [field, parameters.get(field) ?? ""]));
  // a link to answers opens at them
  const view = VIEWS.includes(state.view) ? state.view : (OF_ANSWERS.some(field => state[field]) ? "answers" : "curves");
  return {...state, view, runs: parameters.getAll("run")};
}

/** Change the address. With `step` the browser's Back button returns to the view before. */
export function write(changes, {step = false} = {}) {
  const state = {...read(), ...changes};
  const parameters = new URLSearchParams();
  for (const name of state.runs) parameters.append("run", name);
  for (const field of FIELDS) if (field !== "run" && state[field] !== "") parameters.set(field, state[field]);
  const hash = `#${parameters}`;
  if (hash !== location.hash) history[step ? "pushState" : "replaceState"](null, "", hash);
}
