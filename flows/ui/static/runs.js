/* The pane of runs, what those that are chosen do now, and how their configs differ. */

import {at, dot, duration, make, number} from "ui/dom";
import {source} from "ui/source";

const SORTS = {
  newest: (a, b) => a.age_s === b.age_s ? 0 : (a.age_s ?? Infinity) - (b.age_s ?? Infinity),
  best: (a, b) => (b.best_validation?.[1] ?? -Infinity) - (a.best_validation?.[1] ?? -Infinity),
  name: () => 0,
  state: (a, b) => a.state < b.state ? -1 : a.state > b.state ? 1 : 0,
};
const folds = new Map();  // by name, whether somebody has unfolded a run

const said = summary => [summary.name, summary.state, summary.recipe, summary.parent && `fork of ${summary.parent}`]
  .filter(Boolean).join(" ").toLowerCase();

/** The runs that the words in the search box name, in the chosen order; runs of equal rank by name. */
export function found(summaries) {
  const words = at("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rank = SORTS[at("sort").value];
  return summaries.filter(summary => words.every(word => said(summary).includes(word)))
    .sort((a, b) => rank(a, b) || a.name.localeCompare(b.name, undefined, {numeric: true}));
}

/** The pane: without a search, forks are folded under their run. `choose` is called with the names that are then chosen. */
export function list(summaries, chosen, choose) {
  const focused = document.activeElement?.closest?.("[data-name]")?.dataset.name;
  const control = ["input", ".fold", ".name"].find(selector => document.activeElement?.matches(selector));
  const shown = found(summaries);
  const isSearch = at("find").value.trim() !== "";
  const names = new Set(shown.map(({name}) => name));
  const forks = new Map(shown.map(({name}) => [name, []]));
  if (!isSearch) for (const summary of shown) forks.get(summary.parent)?.push(summary);
  const parents = new Map(shown.map(({name, parent}) => [name, parent]));
  const above = new Set();  // runs with a fork that is chosen
  for (let name of chosen) while ((name = parents.get(name)) && !above.has(name)) above.add(name);
  const rows = [];
  const added = new Set();
  const add = (summary, depth) => {
    added.add(summary.name);
    const below = forks.get(summary.name).filter(({name}) => !added.has(name));
    const isOpen = folds.get(summary.name) ?? above.has(summary.name);
    rows.push(row(summary, depth, below.length, isOpen));
    if (isOpen) for (const fork of below) add(fork, depth + 1);
  };

  function row(summary, depth, below, isOpen) {
    const place = chosen.indexOf(summary.name);
    const box = make("input", {type: "checkbox", checked: place >= 0, "data-run": summary.name, "aria-label": `show ${summary.name}`,
      title: "show beside the others"});
    box.onchange = () => choose(box.checked ? [...chosen, summary.name] : chosen.filter(name => name !== summary.name));
    const name = make("button", {type: "button", className: "plain name", title: `show only ${summary.name}: ${summary.url}`},
      ...(place >= 0 ? [dot(place)] : []), summary.name);
    name.onclick = () => choose([summary.name]);
    const [metric, best] = summary.best_validation ?? ["", null];
    const facts = [summary.iterations ? `${summary.iteration} of ${summary.iterations}` : summary.iteration ? String(summary.iteration) : "",
      best === null ? "" : `best ${number(best, 3)}`, summary.age_s === null ? "" : `${duration(summary.age_s)} ago`, summary.recipe];
    const told = make("span", {className: "dim", title: metric}, facts.filter(Boolean).join(" · "));
    const fold = make("button", {type: "button", className: "plain dim fold", "aria-expanded": String(isOpen)}, `${isOpen ? "▾" : "▸"} ${below}`);
    fold.title = fold.ariaLabel = `${below} ${below === 1 ? "fork" : "forks"} of ${summary.name}`;
    fold.onclick = () => {
      folds.set(summary.name, !isOpen);
      list(summaries, chosen, choose);
    };
    const item = make("li", {"data-name": summary.name, className: place >= 0 ? "chosen" : ""}, box,
      make("div", {}, name, make("div", {className: "facts"},
        make("span", {className: `state ${summary.state.replace(" ", "-")}`, title: summary.problem}, summary.state), " ", told)),
      ...(below ? [fold] : []));
    item.style.paddingLeft = `${8 + 14 * depth}px`;
    return item;
  }

  for (const summary of shown) if (isSearch || !names.has(summary.parent)) add(summary, 0);
  const rings = isSearch ? [] : shown.filter(({name}) => isInRing(name, parents));
  for (const summary of rings) if (!added.has(summary.name)) add(summary, 0);
  at("found").textContent = !summaries.length ? "" : isSearch ? `${shown.length} of ${summaries.length} runs`
    : summaries.length === 1 ? "1 run" : `${summaries.length} runs`;
  const nothing = !summaries.length
    ? ["no run in this store yet: ", make("code", {}, "ratchet train CONFIG.yaml"), " or ", make("code", {}, "ratchet demo"), " makes one"]
    : ["no run matches"];
  at("list-of-runs").replaceChildren(...(rows.length ? rows : [make("li", {className: "dim"}, make("p", {}, ...nothing))]));
  const item = [...at("list-of-runs").children].find(element => element.dataset.name === focused);
  if (focused && control) item?.querySelector(control)?.focus({preventScroll: true});
}

/** Whether a run descends from itself, as where a name was deleted and used again. */
function isInRing(name, parents) {
  const seen = new Set();
  for (let at = parents.get(name); at && !seen.has(at); at = parents.get(at)) {
    if (at === name) return true;
    seen.add(at);
  }
  return false;
}

function state(view) {
  if (view.state === "fit") return `a fit, ${view.closed} rounds`;
  const total = view.iterations === null ? "" : ` of ${view.iterations}`;
  return `${view.closed}${total} iterations closed${view.state === "finished" ? "" : `, ${view.state}`}`;
}

/** Whether a run has an iteration that is still to be closed. */
export const isOpen = view => ["not started", "running", "stopped", "failed"].includes(view.state);

function stage({label, name, progress, seconds}) {
  const [done, total] = progress.split("/").map(Number);
  const share = progress === "✓" ? 1 : progress === "–" ? 1 : total ? done / total : 0;
  const bar = make("div", {className: progress === "–" ? "fill skipped" : "fill"});
  bar.style.width = `${100 * share}%`;
  const text = progress === "" ? "·" : progress;
  const took = seconds === null ? "" : duration(seconds);
  const words = {"✓": "committed", "–": "skipped", "": "missing"}[progress] ?? `${progress} shards committed`;
  return make("li", {title: `${name}: ${words}`}, make("span", {}, label), make("b", {}, text), make("span", {className: "dim"}, took), bar);
}

/** What a running run computes now. */
function computing(view) {
  if (view.state !== "running") return "";
  const begun = view.stages.filter(({progress}) => progress.includes("/"));
  const next = view.stages.find(({progress}) => progress === "");
  return begun.length ? `computes ${begun.map(({label, progress}) => `${label} ${progress}`).join(", ")}` : next ? `waits for ${next.label}` : "";
}

const known = (view, key) => (view.metrics[key] ?? []).filter(value => value !== null);
const STEPS = 5;

/** Seconds until a running run has all iterations, at the pace of the last ones; null if unknown. */
function remaining(view) {
  const steps = known(view, "perf/time_per_step").slice(-STEPS);
  if (view.state !== "running" || !steps.length || view.iterations === null) return null;
  return (view.iterations - view.closed) * steps.reduce((sum, value) => sum + value, 0) / steps.length;
}

/** What each chosen run does now, and what is wrong with it; `answers` is called with a run and an iteration. */
export function now(views, summaries, answers) {
  const open = new Set([...at("now").querySelectorAll("details[open]")].map(details => details.dataset.of));
  const focused = document.activeElement?.closest?.("#now details")?.dataset.of;
  const card = (name, index, ...content) => make("div", {className: "card"}, make("h3", {}, dot(index), name), ...content);
  at("now").replaceChildren(...views.map((view, index) => {
    const summary = summaries.find(({name}) => name === view.name);
    const left = remaining(view);
    const line = [state(view), view.trainer === null ? "" : `computed by ${view.trainer}`, left === null ? "" : `about ${duration(left)} left`, computing(view)].filter(Boolean).join(", ");
    const facts = [
      ["throughput", known(view, "perf/response_tokens_per_s").at(-1) ?? null, value => `${number(value, 3)} response tokens/s`],
      ["last iteration", known(view, "perf/time_per_step").at(-1) ?? null, duration],
      ["snapshots after", view.trainer === null ? view.snapshots.slice(-6).join(", ") || "none" : null, value => value],
      ["folder", view.url, value => value],
    ].filter(([, value]) => value !== null);
    const stages = isOpen(view)
      ? [make("p", {className: "dim"}, `iteration ${view.closed}`), make("ol", {className: "stages"}, ...view.stages.map(stage))] : [];
    const isToResume = source.live && view.trainer === null && ["failed", "stopped", "not started"].includes(view.state);
    const parent = view.parent ? [make("p", {className: "dim"}, `forked from ${view.parent}`)] : [];
    const problem = summary?.problem ? [make("p", {className: "problem"}, summary.problem)] : [];
    const alerts = [...new Map(view.alerts.map(alert => [alert.text, alert])).values()].map(({first, last, text}) => {
      const link = make("button", {type: "button", className: last === view.closed - 1 ? "plain problem" : "plain dim"},
        `${first === last ? `iteration ${first}` : `iterations ${first} to ${last}`}: ${text}`);
      link.onclick = () => answers(view.name, first);
      return link;
    });
    const fix = isToResume ? [make("p", {className: "dim"}, make("code", {}, `ratchet resume ${view.url}`), " continues")] : [];
    const more = make("details", {"data-of": view.name, open: open.has(view.name)}, make("summary", {className: "dim"}, "more"),
      make("dl", {}, ...facts.flatMap(([name, value, text]) => [make("dt", {}, name), make("dd", {}, text(value))])));
    return card(view.name, index, make("p", {className: `state ${view.state.replace(" ", "-")}`}, line), ...parent, ...problem, ...fix, ...alerts, ...stages, more);
  }));
  if (focused) [...at("now").querySelectorAll("details")].find(details => details.dataset.of === focused)?.querySelector("summary").focus({preventScroll: true});
}

/** The keys in which the configs of several runs differ, of those of several trainers the main ones, or the main keys of one. */
export function config(views) {
  const isOneProgram = new Set(views.map(view => view.trainer)).size === 1;
  const told = views.flatMap(view => isOneProgram ? Object.keys(view.config) : view.main_keys);
  const differing = [...new Set(told)].filter(key =>
    key !== "run.name" && new Set(views.map(view => view.config[key] ?? "–")).size > 1);
  const keys = views.length === 1 ? views[0].main_keys : differing;
  at("config-title").textContent = views.length > 1 ? "Config keys in which the runs differ" : "Config";
  const row = (tag, cells) => make("tr", {}, ...cells.map(cell => make(tag, {}, cell)));
  const rows = keys.map(key => row("td", [key, ...views.map(view => view.config[key] ?? "–")]));
  at("config").replaceChildren(row("th", ["key", ...views.map(view => view.name)]),
    ...(rows.length || !views.length ? rows : [row("td", [views.length > 1 ? "the configs are the same" : "the config is unknown"])]));
}
