/* Curves of metrics over iterations, and bars of the time that stages take. */

import {read, write} from "ui/address";
import {at, dot, make, number} from "ui/dom";
import {Plot} from "ui/plot";

const TIME = "timing_s/";
const SHARES_OVER = 10;
const ERRORS = 2;  // standard errors that are drawn to both sides of a validation
const cards = new Map();
const nothing = Object.fromEntries(["curves", "seconds"].map(parent =>
  [parent, make("p", {className: "dim"}, "no metrics of a closed iteration")]));

/** The range of an axis: a tenth of room; around a constant, a tenth of its value. */
function range(values) {
  const known = values.filter(value => value !== null);
  const [low, high] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (!known.length || (low === 0 && high === 0)) return [0, 1];
  const room = (high - low) / 10 || Math.abs(high) / 10;
  return [low - room, high + room];
}

/**
 * Draw a card, created where it is missing; its plot is drawn again only if the data has changed. `tell` gives what
 * stands above the plot, for the iteration of an index or, with null, for the end; `pick` is called with the index of
 * an iteration and the place of a series, of the point that is clicked.
 */
function card(key, title, height, data, tell, pick = null) {
  if (!cards.has(key)) {
    const values = make("div", {className: "values"});
    const place = make("div", {className: "chart", tabIndex: 0, role: "img"});
    place.style.height = `${height}px`;
    place.plot = new Plot(place, height);
    cards.set(key, {element: make("div", {className: "card"}, make("h3", {}, title), values, place), place, values, drawn: ""});
  }
  const entry = cards.get(key);
  const {plot} = entry.place;
  plot.told = at => entry.values.replaceChildren(...tell(at));
  plot.picked = pick;
  const wanted = JSON.stringify(data);
  if (entry.drawn !== wanted) {
    plot.show(data);
    entry.drawn = wanted;
  }
  plot.point();
  const last = data.series.map(({label, values}) => `${label} ${number(newest(values))}`).join(", ");
  entry.place.setAttribute("aria-label", `${title}: ${last} at the end`);
  return entry.element;
}

const newest = values => values.findLast(value => value !== null) ?? null;

/** Exponential means, which begin at the first value. */
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Where the rows of a view lie on the x axis: at the end of their iteration, or before it, as validations do. */
function places(view, x, before) {
  const {iteration} = view.metrics;
  if (x === "" || view.state === "fit") return iteration;
  const each = Number(view.config["data.prompts_per_iteration"]) * Number(view.config["rollout.n"] ?? 1);
  const steps = view.metrics["perf/time_per_step"] ?? [];
  if (view.trainer !== null && !(x === "seconds" ? steps.length : each)) return iteration;  // it has not said it
  let sum = 0;
  return iteration.map((_, row) => {
    const start = sum;
    sum += x === "seconds" ? steps[row] ?? 0 : each;
    return before ? start : sum;
  });
}

function curve(key, title, drawn, dots, pick) {
  const {x: over, smooth, log} = read();
  const lines = drawn.map(({view, index}) => {
    const raw = view.metrics[key];
    const rows = places(view, over, dots);
    const values = smooth && !dots ? smoothed(raw, Number(smooth)) : raw;
    const at = new Map();  // two rows may be at one place, such as a validation after the last iteration
    rows.forEach((place, row) => (raw[row] !== null || !at.has(place)) && at.set(place, row));
    const errors = view.stderrs[key];
    const alerts = view.alerts.filter(({metric}) => metric === key);
    return {view, index, at, values, raw, errors, alerts};
  });
  const x = [...new Set(lines.flatMap(line => [...line.at.keys()]))].sort((a, b) => a - b);
  const on = (line, values) => x.map(place => line.at.has(place) ? values[line.at.get(place)] : null);
  const around = (line, by) => on(line, line.raw.map((value, row) => value === null ? null : value + by * (line.errors[row] ?? 0)));
  const series = lines.map(line => ({label: line.view.name, number: line.index, values: on(line, line.values),
    ...(line.values === line.raw ? {} : {faint: on(line, line.raw)}),
    ...(line.errors ? {low: around(line, -ERRORS), high: around(line, ERRORS)} : {})}));
  const iterations = lines.map(line => x.map(place => line.at.has(place) ? line.view.metrics.iteration[line.at.get(place)] : null));
  const alertsAt = place => lines.flatMap(line => line.alerts.filter(({first, last}) => {
    const iteration = line.at.has(place) ? line.view.metrics.iteration[line.at.get(place)] : null;
    return iteration !== null && first <= iteration && iteration <= last;
  }));
  const marks = lines.flatMap(line => line.alerts.map(({first}) =>
    ({number: line.index, x: x.find(place => line.at.has(place) && line.view.metrics.iteration[line.at.get(place)] === first)})))
    .filter(mark => mark.x !== undefined);
  const all = series.flatMap(({values, faint, low, high}) => [...values, ...faint ?? [], ...low ?? [], ...high ?? []])
    .filter(value => value !== null);
  const isLog = Boolean(log) && all.every(value => value > 0) && all.length > 0;
  const xs = x.length === 1 ? [x[0] - 1, x[0] + 1] : [x[0], x.at(-1)];
  const ys = isLog ? range(all.map(Math.log10)).map(value => 10 ** value) : range(all);
  const data = {x, series, marks, xs, ys, dots, joined: over !== "", log: isLog, unit: over};
  const called = {trajectories: "trajectories", seconds: "s"}[over] ?? "it";
  return card(key, title, 170, data, at => [
    make("span", {className: "dim"}, at === null ? "last" : over ? `${number(x[at])} ${called}` : `it ${x[at]}`),
    ...series.map(one => make("span", {}, dot(one.number), number(at === null ? newest(one.values) : one.values[at]),
      ...(at !== null && one.high?.[at] > one.values[at] ? [` ± ${number(one.high[at] - one.values[at], 2)}`] : []))),
    ...(at === null ? [] : alertsAt(x[at])).map(({text}) => make("span", {className: "problem"}, text))],
    (at, line) => iterations[line][at] !== null && lines[line].view.state !== "fit" && pick(series[line].label, iterations[line][at]));
}

function seconds(view, stages) {
  const present = stages.filter(stage => view.metrics[stage]);
  const rows = view.metrics.iteration.map((_, row) => row).filter(row => present.some(key => view.metrics[key][row] !== null));
  const x = rows.map(row => view.metrics.iteration[row]);
  const series = present.map(stage => ({label: stage.slice(TIME.length), number: stages.indexOf(stage),
    values: rows.map(row => view.metrics[stage][row] ?? 0)}));
  const highest = x.map((_, row) => series.reduce((sum, {values}) => sum + values[row], 0)).reduce((a, b) => Math.max(a, b), 0);
  const data = {x, series, xs: [x[0] - 0.6, x.at(-1) + 0.6], ys: [0, (highest || 1) * 1.05], bars: true};
  return card(`seconds of ${view.name}`, `${view.name}: seconds by stage`, 240, data, at => {
    const of = at === null ? x.map((_, row) => row).slice(-SHARES_OVER) : [at];
    const means = series.map(({values}) => of.reduce((sum, row) => sum + values[row], 0) / of.length);
    const total = means.reduce((sum, value) => sum + value, 0) || 1;
    return [make("span", {className: "dim"}, at === null ? `mean of the last ${of.length}` : `it ${x[at]}`),
      ...series.map((stage, row) => make("span", {}, dot(stage.number),
        `${stage.label} ${number(means[row], 2)} s, ${Math.round(100 * means[row] / total)} %`))];
  });
}

const form = at("drawing");

/** Let the form say how curves are drawn, and call `draw` when it changes. */
export function start(draw) {
  form.addEventListener("input", () => {
    const {metric, x, smooth, log} = form.elements;
    write({metric: metric.value, x: x.value, smooth: smooth.value, log: log.checked ? "1" : ""});
    draw();
  });
  form.addEventListener("submit", event => event.preventDefault());
}

/**
 * Draw what runs have in common and what only some have; `drawn` are {view, index}, index gives the colour. `pick` is
 * called with the run and the iteration of a point that is clicked.
 */
export function show(drawn, pick) {
  const state = read();
  for (const name of ["metric", "x", "smooth"]) if (document.activeElement !== form.elements[name]) form.elements[name].value = state[name];
  form.elements.log.checked = state.log !== "";
  const words = state.metric.toLowerCase().split(/\s+/).filter(Boolean);
  const titles = new Map(drawn.flatMap(({view}) => Object.entries(view.titles)));
  const stages = [...titles.keys()].filter(key => key.startsWith(TIME) && !titles.get(key));
  const shown = {curves: [], seconds: []};
  let hidden = 0;
  for (const [key, title] of titles) {
    const having = drawn.filter(({view}) => view.metrics[key]?.some(value => value !== null));
    if (!having.length || stages.includes(key)) continue;
    if (words.every(word => `${key} ${title}`.toLowerCase().includes(word))) shown.curves.push(curve(key, title, having, /^val(-core)?\//.test(key), pick));
    else hidden += 1;
  }
  for (const {view} of drawn) {
    if (stages.some(stage => view.metrics[stage]?.some(value => value !== null))) shown.seconds.push(seconds(view, stages));
  }
  at("no-curves").hidden = !hidden;
  at("no-curves").textContent = shown.curves.length ? `${hidden} other metrics do not match` : `none of ${hidden} metrics matches`;
  const hasNoTimes = ({view}) => view.state === "fit" || (view.trainer !== null && !stages.some(stage => view.metrics[stage]));
  at("time").hidden = words.length > 0 || (drawn.length > 0 && drawn.every(hasNoTimes));
  for (const [parent, cardsNow] of Object.entries(shown)) {
    const elements = cardsNow.length || (parent === "curves" && hidden) ? cardsNow : [nothing[parent]];
    const now = [...at(parent).children];
    if (now.length !== elements.length || now.some((element, place) => element !== elements[place])) {
      at(parent).replaceChildren(...elements);
    }
  }
}
