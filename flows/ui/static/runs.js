/* The list of runs, the open iteration of those that are chosen, and how their configs differ. */

import {at, dot, duration, make, number} from "ui/dom";

/** The table of runs; `choose` is called with the names that are then chosen. */
export function list(summaries, chosen, choose) {
  const focused = document.activeElement?.dataset?.run;
  const rows = summaries.map(summary => {
    const place = chosen.indexOf(summary.name);
    const box = make("input", {type: "checkbox", checked: place >= 0, "data-run": summary.name, "aria-label": `show ${summary.name}`});
    box.onchange = () => choose(box.checked ? [...chosen, summary.name] : chosen.filter(name => name !== summary.name));
    const name = make("button", {type: "button", className: "plain", title: `show only ${summary.name}: ${summary.url}`},
      ...(place >= 0 ? [dot(place)] : []), summary.name);
    name.onclick = () => choose([summary.name]);
    const [metric, best] = summary.best_validation ?? ["", null];
    const done = summary.iterations ? `${summary.iteration} of ${summary.iterations}` : String(summary.iteration);
    const bar = make("progress", {max: summary.iterations || 1, value: summary.iterations ? summary.iteration : 1, "aria-label": "iterations"});
    return make("tr", {"data-name": summary.name}, make("td", {}, box), make("td", {className: "name"}, name),
      make("td", {className: `state ${summary.state.replace(" ", "-")}`}, summary.state),
      make("td", {}, done, ...(summary.iterations ? [bar] : []), ...(summary.problem ? [make("div", {className: "dim"}, summary.problem)] : [])),
      make("td", {className: "optional", title: metric}, best === null ? "" : number(best, 3)),
      make("td", {className: "optional"}, summary.age_s === null ? "" : duration(summary.age_s)));
  });
  const head = ["", "run", "state", "iterations", "best validation", "last commit"].map((text, column) =>
    make("th", {scope: "col", className: column > 3 ? "optional" : ""}, text));
  const body = rows.length ? rows : [make("tr", {}, make("td", {colSpan: 6, className: "dim"}, "no run in this store yet"))];
  at("list-of-runs").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
  if (focused) [...document.querySelectorAll("[data-run]")].find(box => box.dataset.run === focused)?.focus();
}

function state(view) {
  if (view.state === "fit") return `a fit, ${view.closed} rounds`;
  return `${view.closed} of ${view.iterations} iterations closed${view.state === "finished" ? "" : `, ${view.state}`}`;
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

const last = (view, key) => view.metrics[key]?.findLast(value => value !== null) ?? null;

/** What each chosen run does now. */
export function now(views) {
  at("now").replaceChildren(...views.map((view, index) => {
    const facts = [
      ["throughput", last(view, "perf/response_tokens_per_s"), value => `${number(value, 3)} response tokens/s`],
      ["last iteration", last(view, "perf/time_per_step"), duration],
      ["snapshots after", view.snapshots.slice(-6).join(", ") || "none", value => value],
      ["forked from", view.parent, value => value],
      ["folder", view.url, value => value],
    ].filter(([, value]) => value !== null);
    const open = isOpen(view)
      ? [make("p", {className: "dim"}, `iteration ${view.closed}`), make("ol", {className: "stages"}, ...view.stages.map(stage))] : [];
    return make("div", {className: "card"}, make("h3", {}, dot(index), view.name), make("p", {}, state(view)), ...open,
      make("dl", {}, ...facts.flatMap(([name, value, text]) => [make("dt", {}, name), make("dd", {}, text(value))])));
  }));
}

/** The keys in which the configs of several runs differ, or the main keys of one. */
export function config(views) {
  const differing = [...new Set(views.flatMap(view => Object.keys(view.config)))].filter(key =>
    key !== "run.name" && new Set(views.map(view => view.config[key] ?? "–")).size > 1);
  const keys = views.length === 1 ? views[0].main_keys : differing;
  at("config-title").textContent = views.length > 1 ? "Config keys in which the runs differ" : "Config";
  const row = (tag, cells) => make("tr", {}, ...cells.map(cell => make(tag, {}, cell)));
  const rows = keys.map(key => row("td", [key, ...views.map(view => view.config[key] ?? "–")]));
  at("config").replaceChildren(row("th", ["key", ...views.map(view => view.name)]),
    ...(rows.length || !views.length ? rows : [row("td", ["the configs are the same"])]));
}

