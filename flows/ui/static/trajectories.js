/* The browser of trajectories: a list that is filtered, one trajectory with coloured tokens, and what lies beside it. */

import {read, write} from "ui/address";
import * as histograms from "ui/histograms";
import {at, damages, make, number, options} from "ui/dom";
import {isOpen} from "ui/runs";
import {chip, figures, short, thumbnails} from "ui/images";
import {source} from "ui/source";
import {timeline} from "ui/timeline";

const GROUP = "";
const HISTORY = ":iterations";  // no run's name has a colon
const TYPING_MS = 300;
const form = at("filters");
const filters = ["iteration", "order", "low", "high", "shortest", "longest", "text", "where"];
let views = [];
let listed = [];
let opened = null;
let compared = null;
let asked = 0;
let asking = "";
let leaving = new AbortController();
let isShown = false;
let drawn = "";
let looking = new AbortController();

const run = () => {
  const {of} = read();
  return views.find(view => view.name === of) ?? views[0];
};

const newest = view => Math.max(0, Math.min(view.closed, view.iterations ?? view.closed) - 1);

/** The filter as the source wants it. A server is asked about one iteration, unless it shall read all of them. */
function filter(view) {
  const state = read();
  const chosen = form.elements.iteration.value;
  const iteration = !source.live ? chosen : chosen === "all" ? "" : chosen || String(newest(view));
  const wanted = Object.fromEntries(filters.map(name => [name, state[name]]));
  return {...wanted, iteration};
}

/** Show the trajectories of these runs, as the address says. */
export async function show(shown) {
  views = shown.filter(view => view.state !== "fit");
  at("trajectories").hidden = !views.length;
  at("no-answers").hidden = !shown.length || views.length > 0;
  if (!views.length || read().view !== "answers") return;
  const view = run();
  const state = read();
  options(form.elements.of, views.map(({name}) => [name, name]), view.name);
  const pairs = await iterations(view);  // another run may have fewer
  options(form.elements.iteration, pairs, pairs.some(([value]) => value === state.iteration) ? state.iteration : "");
  at("sql").hidden = !source.live;
  for (const name of ["low", "high", "shortest", "longest", "text", "where"]) {
    if (document.activeElement !== form.elements[name]) form.elements[name].value = state[name];
  }
  form.elements.order.value = state.order || "best";
  await list();
  if (!isShown && state.id && matchMedia("(max-width: 800px)").matches) at("reader").scrollIntoView();  // a link to it
  isShown = true;
}

async function iterations(view) {
  if (source.live) {
    const last = isOpen(view) ? view.closed : view.closed - 1;
    const all = Array.from({length: last + 1}, (_, back) => last - back);
    return [["", `newest closed`], ["all", "all"], ...all.map(iteration =>
      [String(iteration), iteration === view.closed ? `${iteration} (open)` : String(iteration)])];
  }
  const {lines} = await source.trajectories(view.name, {});
  return [["", "all in this report"], ...[...new Set(lines.map(line => line.iteration))].sort((a, b) => b - a)
    .map(iteration => [String(iteration), String(iteration)])];
}

/** Ask for the list, unless the same was asked and nothing has been committed since. */
async function list() {
  const view = run();
  const wanted = filter(view);
  const changes = wanted.iteration !== "" && Number(wanted.iteration) < view.closed ? "" : JSON.stringify([view.closed, view.stages]);
  const question = JSON.stringify([view.name, wanted, changes]);
  if (question !== asking) {
    asking = question;
    const turn = ++asked;
    leaving.abort();
    leaving = new AbortController();
    try {
      const answer = await source.trajectories(view.name, wanted, leaving.signal);
      if (turn !== asked) return;
      listed = answer.lines;
      at("filter-error").hidden = true;
      at("count").textContent = count(view, answer, wanted.iteration);
      histograms.show(answer, narrow);
      damages("left-out", answer.damages);
    } catch (error) {
      if (turn !== asked) return;
      if (error instanceof TypeError) asking = "";  // the server was not reached: ask again
      at("filter-error").textContent = error.message;
      at("filter-error").hidden = false;
      listed = [];
      at("count").textContent = "";
      histograms.show({scores: [], lengths: []}, narrow);
      damages("left-out", []);
      rows();
      await open();
      return;
    }
  }
  rows();
  await open();
}

function count(view, {lines, matching, total, damages}, iteration) {
  if (!total && !damages.length) return iteration === "" ? "no iteration is closed yet" : `iteration ${iteration} has no trajectories yet`;
  if (!source.live) {
    const closed = new Set(lines.map(line => line.iteration)).size;
    return `${matching} of ${total} trajectories: a sample of the newest closed iterations${closed ? "" : ", none of which match"}, `
      + "with the best, the worst, and others evenly spread between them";
  }
  const where = iteration === "" ? "all iterations" : `iteration ${iteration}`;
  const first = matching > lines.length ? `; the first ${lines.length} are listed` : "";
  return `${matching} of ${total} trajectories of ${where}${first}`;
}

const tokens = ({length}) => length === null ? "" : `${length} tokens`;

function button(line, pressed, named) {
  const facts = [`score ${number(line.score)}`, named && `iteration ${line.iteration}`, tokens(line), line.finish_reason].filter(Boolean);
  const element = make("button", {type: "button", "aria-pressed": String(pressed), "data-id": line.id},
    make("div", {className: "dim"}, facts.join(" · ")), ...thumbnails(line, run().name),
    make("div", {className: "clip"}, short(line.response) || "(empty)"));
  element.onclick = () => choose(line.id);
  return element;
}

/** List only the answers of a histogram's bar. */
function narrow(changes) {
  write({...changes, id: ""}, {step: true});
  show(views);
}

function choose(id) {
  write({id}, {step: true});
  rows();
  open(true);
}

function rows() {
  const {id} = read();
  const chosen = id || listed[0]?.id;
  const now = JSON.stringify([asking, chosen, listed.length]);
  if (now === drawn) return;  // so that a selection and the focus last
  drawn = now;
  const focused = at("list").contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const several = new Set(listed.map(line => line.iteration)).size > 1;
  const buttons = listed.map(line => button(line, line.id === chosen, several));
  const reachable = buttons.find(element => element.dataset.id === chosen) ?? buttons[0];
  for (const element of buttons) element.tabIndex = element === reachable ? 0 : -1;
  const nothing = make("p", {className: "dim"}, "no trajectory matches");
  at("list").replaceChildren(...(buttons.length ? buttons : [nothing]));
  if (focused !== null) buttons.find(element => element.dataset.id === focused)?.focus({preventScroll: true});
}

/** Arrow keys go through the list. */
function walk(event) {
  const buttons = [...at("list").querySelectorAll("button")];
  const place = buttons.indexOf(document.activeElement);
  const next = {ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1}[event.key];
  if (next === undefined || place < 0) return;
  event.preventDefault();
  const target = buttons[Math.min(buttons.length - 1, Math.max(0, next))];
  target.focus();
  if (target.dataset.id !== buttons[place].dataset.id) choose(target.dataset.id);
}

/** Open the next answer of the list, or the one before. */
export function step(by) {
  if (!views.length || read().view !== "answers") return;
  const {id} = read();
  const place = Math.max(0, listed.findIndex(line => line.id === (id || listed[0]?.id)));
  const next = listed[Math.min(listed.length - 1, Math.max(0, place + by))];
  if (!next || next.id === id) return;
  choose(next.id);
  at("list").querySelector("[aria-pressed=true]")?.scrollIntoView({block: "nearest"});
}

/** List the next iteration, or the one before. */
export function otherIteration(by) {
  if (!views.length || read().view !== "answers") return;
  const there = [...form.elements.iteration.options].map(option => option.value).filter(value => /^\d+$/.test(value)).map(Number);
  const {value} = form.elements.iteration;
  const now = /^\d+$/.test(value) ? Number(value) : source.live ? newest(run()) : Math.max(...there) + 1;
  const next = there.filter(iteration => by > 0 ? iteration > now : iteration < now).sort((a, b) => by * (a - b))[0];
  if (next === undefined) return;
  write({iteration: String(next), id: ""});
  show(views);
}

/** Choose the next option of a select of the reader. */
export function nextOf(id) {
  const select = at(id);
  if (!select || read().view !== "answers" || (id === "quantity" && !opened?.trajectory)) return;
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.onchange();
}

const iterationOf = id => Number(/^it(\d+)-/.exec(id)?.[1] ?? 0);

/** Show the trajectory of the address, or the first of the list. */
async function open(bySelection = false) {
  const view = run();
  const state = read();
  const id = state.id || listed[0]?.id;
  const isRun = views.some(({name}) => name === state.beside) && state.beside !== view.name;
  const other = isRun || state.beside === HISTORY ? state.beside : GROUP;
  if (!id) {
    opened = compared = null;
    looking.abort();
    at("reader").replaceChildren(make("p", {className: "dim"}, "no trajectory"));
    at("beside").replaceChildren();
    at("beside").hidden = true;
    return;
  }
  const names = views.map(({name}) => name);
  const key = JSON.stringify([view.name, id, other, names, view.closed > iterationOf(id) ? "" : asking]);
  if (opened?.key === key && (!opened.beside || opened.colour === state.colour)) return;
  if (opened?.key !== key) {
    const mine = opened = {key};
    looking.abort();
    looking = new AbortController();
    const {signal} = looking;
    try {
      mine.trajectory = await source.trajectory(view.name, iterationOf(id), id);
    } catch (error) {
      if (opened !== mine) return;
      opened = compared = null;
      at("reader").replaceChildren(make("p", {role: "alert"}, error.message));
      at("beside").replaceChildren();
      return;
    }
    if (opened !== mine) return;
    reader(at("reader"), mine.trajectory, view.name, true);  // what is beside it may take longer
    const found = await (isRun ? source.trajectory(other, iterationOf(id), id)
      : other === HISTORY ? source.trajectories(view.name, {like: id, order: "newest"}, signal)
      : source.trajectories(view.name, {iteration: String(mine.trajectory.iteration), prompt_id: mine.trajectory.prompt_id}, signal)
    ).catch(error => error);
    if (opened !== mine) return;
    mine.beside = found;
  } else {
    reader(at("reader"), opened.trajectory, view.name, true);
  }
  opened.colour = state.colour;
  compared = isRun && !(opened.beside instanceof Error) ? opened.beside : null;
  beside(view, other);
  if (bySelection && matchMedia("(max-width: 800px)").matches) at("reader").scrollIntoView();
}

function beside(view, other) {
  const others = views.filter(({name}) => name !== view.name).map(({name}) => [name, `the same in ${name}`]);
  const select = make("select", {id: "beside-what", "aria-label": "what is shown beside it"});
  options(select, [[GROUP, "its group"], [HISTORY, "its prompt over the iterations"], ...others], other);
  select.onchange = () => {
    write({beside: select.value});
    open();
  };
  const focused = document.activeElement?.id === "beside-what";
  at("beside").hidden = false;
  if (opened.beside instanceof Error) {
    at("beside").replaceChildren(select, make("p", {className: "dim"}, opened.beside.message));
  } else if (!compared) {
    const {lines, matching} = opened.beside;
    const mean = lines.reduce((sum, line) => sum + (line.score ?? 0), 0) / lines.length;
    const answers = lines.length === 1 ? "1 answer" : `${lines.length} answers`;
    const sample = source.live ? "" : " in this report";
    const first = matching > lines.length ? ` of ${matching}` : "";
    at("beside").replaceChildren(select, make("p", {className: "dim"}, `${answers}${first} to the same prompt${sample}, mean score ${number(mean)}`),
      make("div", {className: "group"}, ...lines.map(line =>
        button(line, line.id === opened.trajectory.id, other === HISTORY))));
  } else {
    const content = make("div");
    at("beside").replaceChildren(select, content);
    reader(content, compared, other, false);
  }
  if (focused) select.focus();
}

/* ---- one trajectory ---- */

const isEntropy = name => name === "entropy";

/* Blue above zero and orange below; for the entropy, violet. */
function shade(value, name, [low, high]) {
  if (value === null || value === undefined) return "transparent";
  const share = isEntropy(name) ? (value - low) / (high - low || 1) : value / (high || 1);
  const rgb = isEntropy(name) ? "138, 99, 201" : share < 0 ? "230, 120, 40" : "50, 120, 220";
  return `rgba(${rgb}, ${(Math.min(1, Math.abs(Math.max(share, isEntropy(name) ? 0 : -1))) * .7).toFixed(3)})`;
}

function paint(place, trajectory, name) {
  const range = trajectory.scales[name] ?? [-1, 1];
  const values = trajectory.quantities[name] ?? [];
  for (const token of place.querySelectorAll(".token")) {
    const value = values[token.dataset.index];
    token.style.backgroundColor = shade(value, name, range);
    token.title = `${name} ${number(value)}`;
  }
  const steps = [0, .25, .5, .75, 1].map(share => shade(range[0] + share * (range[1] - range[0]), name, range));
  const bar = make("i");
  bar.style.background = `linear-gradient(to right, ${steps.join(", ")})`;
  place.querySelector(".range").replaceChildren(number(range[0], 2), bar, number(range[1], 2));
}

function reader(place, trajectory, name, isMain) {
  const parts = Object.entries(trajectory.parts).map(([part, value]) => `${part} ${number(value)}`).join(", ");
  const facts = [["score", number(trajectory.score)], ["reward parts", parts], ["ground truth", trajectory.ground_truth],
    ["finish reason", trajectory.finish_reason], ["length", tokens(trajectory)], ["error", trajectory.errors.join("; ")]]
    .filter(([, value]) => value);
  const response = make("pre", {className: "response"});
  const told = make("div", {className: "dim told", "aria-live": "polite"});
  const controls = make("div", {className: "scale"});
  const names = Object.keys(trajectory.quantities);
  const coloured = trajectory.tokens && names.length;
  const colour = names.includes(read().colour) ? read().colour : names[0];
  if (coloured) {
    if (isMain) {
      const select = make("select", {id: "quantity", "aria-label": "what tokens are coloured by"});
      options(select, names.map(quantity => [quantity, quantity]), colour);
      select.onchange = () => {
        write({colour: select.value});
        opened.colour = select.value;
        paint(at("reader"), opened.trajectory, select.value);
        if (compared) paint(at("beside"), compared, select.value);
      };
      controls.append(select);
    }
    controls.append(make("span", {className: "dim range"}));
    const folds = new Map(trajectory.folds.map(fold => [fold.start, fold]));
    const shown = [];  // the element of each token
    for (let index = 0; index < trajectory.tokens.length; index = shown.length) {
      const fold = folds.get(index);
      const text = trajectory.tokens[index];
      const element = fold ? chip(place, fold.image, fold.end - fold.start)
        : make("span", {className: text.includes("\n") ? "token break" : "token"}, text);
      element.dataset.index = index;
      response.append(element);
      for (let token = index; token < (fold?.end ?? index + 1); token++) shown.push(element);
    }
    inspect(response, told, trajectory, shown);
  } else {
    response.append(...folded(place, trajectory.response, trajectory.response_parts));
    const why = trajectory.length !== null && !trajectory.tokens ? ["tokens are not coloured: the run's tokenizer was not found"] : [];
    controls.append(...why.map(text => make("span", {className: "dim"}, text)));
  }
  const turns = trajectory.timeline
    ? [make("h4", {}, "timeline"), timeline(trajectory.timeline, trajectory.id, isMain && source.live ? choose : null)] : [];
  const focused = document.activeElement?.id === "quantity";
  place.replaceChildren(
    make("h3", {}, `${trajectory.id} of ${name}`),
    make("dl", {}, ...facts.flatMap(([fact, value]) => [make("dt", {}, fact), make("dd", {}, value)])),
    ...(trajectory.images.length ? [make("h4", {}, "images"), figures(trajectory.images, name)] : []),
    make("h4", {}, "prompt"), make("pre", {className: "prompt"}, ...folded(place, trajectory.prompt, trajectory.prompt_parts)),
    ...turns,
    make("h4", {}, "response"), controls, response, told);
  if (coloured) paint(place, trajectory, colour);
  if (focused && isMain) at("quantity")?.focus();
}

/** A text, with a chip for each run of tokens of an image. */
function folded(place, text, parts) {
  return parts.length ? parts.map(part => part.tokens ? chip(place, part.image, part.tokens) : part.text) : [text];
}

/** Tell the numbers of a token under the mouse, or of the one to which the arrow keys have gone. */
function inspect(response, told, trajectory, shown) {
  let place = -1;
  const tell = index => {
    if (!(index >= 0 && index < trajectory.tokens.length)) return;
    shown[place]?.classList.remove("chosen");
    place = index;
    shown[place].classList.add("chosen");
    const numbers = Object.entries(trajectory.quantities).map(([name, values]) => `${name} ${number(values[index])}`);
    told.textContent = [`token ${index} ${JSON.stringify(trajectory.tokens[index])}`, ...numbers].join(" · ");
  };
  response.tabIndex = 0;
  response.onpointerover = response.onclick = event => tell(Number(event.target.dataset?.index ?? NaN));
  response.onkeydown = event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    tell(Math.min(trajectory.tokens.length - 1, Math.max(0, place + step)));
  };
}

/** What the form says; a default is left out of the address. */
function said() {
  const values = Object.fromEntries(["of", ...filters].map(name => [name, form.elements[name].value]));
  return {...values, of: values.of === views[0].name ? "" : values.of, order: values.order === "best" ? "" : values.order};
}

let typing = 0;
form.addEventListener("input", event => {
  clearTimeout(typing);
  const change = () => {
    write({...said(), id: ""});
    show(views);
  };
  if (event.target.tagName === "SELECT" || !source.live) change();
  else typing = setTimeout(change, TYPING_MS);
});
form.addEventListener("submit", event => event.preventDefault());
at("list").addEventListener("keydown", walk);
