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

function choose(names) {
  write({runs: names, id: ""}, {step: true});
  refresh();
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

const draw = () => charts.show(views.map((view, index) => ({view, index})).filter(({view}) => !hidden.has(view.name)));

/** Ask for the chosen runs; show what has changed. */
async function refresh() {
  const wanted = choice();
  const answers = await Promise.allSettled(wanted.map(name => source.run(name)));
  const failed = answers.find(({status}) => status === "rejected");
  fail(failed?.reason);
  const arrived = answers.filter(({status}) => status === "fulfilled").map(({value}) => value);
  const isNew = arrived.length !== views.length || arrived.some((view, place) => view !== views[place]);
  if (failed?.reason instanceof TypeError) return;
  views = arrived;
  if (isNew || wanted.join("\n") !== asked) {
    asked = wanted.join("\n");
    chosen = views.map(({name}) => name);
    runs.list(summaries, chosen, choose);
    runs.now(views);
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

document.querySelector("nav").onclick = event => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();  // the address holds the state of the page
  const section = document.querySelector(link.getAttribute("href"));
  section.focus({preventScroll: true});
  section.scrollIntoView();
};
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
