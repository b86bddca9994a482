/* The page: which runs are shown, and what is asked again while it is open. */

import {read, write} from "ui/address";
import * as charts from "ui/charts";
import {at, damages, dot, make} from "ui/dom";
import {redraw} from "ui/plot";
import * as runs from "ui/runs";
import {source} from "ui/source";
import * as trajectories from "ui/trajectories";

const VIEWS_MS = 2000;
const RUNS_MS = 10000;
const hidden = new Set();
let summaries = [];
let views = [];
let chosen = [];
let asked = "";
let turns = 0;

function choose(names) {
  write({runs: names, id: ""}, {step: true});
  chosen = choice();  // at once, for the next click
  runs.list(summaries, chosen, choose);
  refresh();
}

/** Show the view that the address names. */
function open() {
  const {view} = read();
  for (const section of document.querySelectorAll("section[data-of]")) section.hidden = section.dataset.of !== view;
  for (const button of document.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", String(button.dataset.view === view));
}

function go(view) {
  write({view}, {step: true});
  open();
  trajectories.show(views);
}

/** Show the answers of an iteration of a run: those behind a point of a curve. */
function answers(run, iteration) {
  const view = views.find(({name}) => name === run);
  const last = runs.isOpen(view) ? view.closed : view.closed - 1;  // a validation may come after it
  write({view: "answers", of: run, iteration: String(Math.min(iteration, last)), id: "", where: "", text: "", low: "", high: "", shortest: "", longest: ""}, {step: true});
  open();
  trajectories.show(views);
}

/** The runs of the address; without any, the newest one, or all of a report. */
function choice() {
  const named = read().runs;
  if (named.length) return named;
  const newest = summaries.find(({state}) => state !== "damaged") ?? summaries[0];
  return (source.live && newest ? [newest] : summaries).map(({name}) => name);
}

function legend() {
  at("legend").replaceChildren(...chosen.length < 2 ? [] : chosen.map((name, index) => {
    const button = make("button", {type: "button", title: "show or hide in the charts", "aria-pressed": String(!hidden.has(name))}, dot(index), name);
    button.onclick = () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      draw();
    };
    return button;
  }));
}

const draw = () => charts.show(views.map((view, index) => ({view, index})).filter(({view}) => !hidden.has(view.name)), answers);

/** Ask for the chosen runs; show what has changed. */
async function refresh() {
  open();
  const turn = ++turns;
  const wanted = choice();
  const replies = await Promise.allSettled(wanted.map(name => source.run(name)));
  if (turn !== turns) return;  // others were chosen meanwhile
  const failed = replies.find(({status}) => status === "rejected");
  fail(failed?.reason);
  const arrived = replies.filter(({status}) => status === "fulfilled").map(({value}) => value);
  const isNew = arrived.length !== views.length || arrived.some((view, place) => view !== views[place]);
  if (failed?.reason instanceof TypeError) return;
  views = arrived;
  if (isNew || wanted.join("\n") !== asked) {
    asked = wanted.join("\n");
    chosen = views.map(({name}) => name);
    runs.list(summaries, chosen, choose);
    runs.now(views, summaries, answers);
    runs.config(views);
    damages("damages", views.flatMap(view => view.damages));
    legend();
    draw();
  }
  await trajectories.show(views);
}

async function relist() {
  try {
    summaries = await source.runs();
  } catch (error) {
    fail(error);
    return;
  }
  runs.list(summaries, chosen, choose);
}

/** Show only the next run of the pane, or the one before. */
function walk(step) {
  const names = [...at("list-of-runs").querySelectorAll("[data-name]")].map(item => item.dataset.name);
  const place = names.indexOf(chosen[0]);
  const next = names[place < 0 ? 0 : Math.min(names.length - 1, Math.max(0, place + step))];
  if (next === undefined || (next === chosen[0] && chosen.length === 1)) return;
  choose([next]);
  at("list-of-runs").querySelector(`[data-name="${CSS.escape(next)}"]`)?.scrollIntoView({block: "nearest"});
}

const KEYS = {
  "/": () => at("find").focus(),
  "?": () => at("keys").showModal(),
  "1": () => go("curves"),
  "2": () => go("answers"),
  "3": () => go("config"),
  j: () => read().view === "answers" ? trajectories.step(1) : walk(1),
  k: () => read().view === "answers" ? trajectories.step(-1) : walk(-1),
  J: () => walk(1),
  K: () => walk(-1),
  "]": () => trajectories.otherIteration(1),
  "[": () => trajectories.otherIteration(-1),
  c: () => trajectories.nextOf("quantity"),
  b: () => trajectories.nextOf("beside-what"),
};

addEventListener("keydown", event => {
  const isTyping = event.target.matches("input:not([type=checkbox]), select, textarea") || at("keys").open;
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

at("find").oninput = at("sort").oninput = () => runs.list(summaries, chosen, choose);
at("find").onkeydown = event => {
  if (event.key === "Escape") at("find").value = "";
  if (event.key === "Enter" && runs.found(summaries).length) choose([runs.found(summaries)[0].name]);
  if (!["Escape", "Enter"].includes(event.key)) return;
  runs.list(summaries, chosen, choose);
  at("find").blur();
};
at("help").onclick = () => at("keys").showModal();
at("views").onclick = event => {
  const button = event.target.closest("[data-view]");
  if (button) go(button.dataset.view);
};
charts.start(draw);

function fail(error) {
  const lost = error instanceof TypeError;
  at("error").hidden = !error;
  if (error) at("error").textContent = lost ? "The server is not reached: is `ratchet ui` still at work?" : error.message;
  const status = !source.live ? `Written ${source.written}` : lost ? "not connected" : "live";
  if (at("status").textContent !== status) at("status").textContent = status;
}

/** Repeat after a pause, while the page is looked at. */
function repeat(action, pause) {
  setTimeout(async () => {
    if (!document.hidden) await action();
    repeat(action, pause);
  }, pause);
}

addEventListener("popstate", refresh);
addEventListener("hashchange", refresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
await relist();
await refresh();
document.body.dataset.ready = "";
if (source.live) {
  repeat(refresh, VIEWS_MS);
  repeat(relist, RUNS_MS);
}
