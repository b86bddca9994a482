/* Curves of metrics over iterations, and bars of the time that stages take. Drawn by uPlot (MIT). */

import uPlot from "ui/uplot";
import {at, color, dot, make, number} from "ui/dom";

const TIME = "timing_s/";
const SHARES_OVER = 10;
const cards = new Map();
const together = uPlot.sync("iterations");
const nothing = Object.fromEntries(["curves", "seconds"].map(parent =>
  [parent, make("p", {className: "dim"}, "no metrics of a closed iteration")]));

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The range of an axis: a tenth of room; around a constant, a tenth of its value. */
function range(low, high) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  const room = (high - low) / 10 || Math.abs(high) / 10;
  return [low - room, high + room];
}

function axis(extra) {
  return {stroke: () => style("--dim"), grid: {stroke: () => style("--grid"), width: 1},
    ticks: {stroke: () => style("--grid"), width: 1, size: 4}, font: "11px system-ui, sans-serif", ...extra};
}

const iterations = (_, splits) => splits.map(split => Number.isInteger(split) ? String(split) : "");

/** The card of a chart, created where it is missing. It is drawn again only if its data has changed. */
function card(parent, key, title, height) {
  if (!cards.has(key)) {
    const heading = make("h3", {}, title);
    const values = make("div", {className: "values"});
    const place = make("div", {className: "chart", tabIndex: 0, role: "img"});
    place.style.height = `${height}px`;
    const element = make("div", {className: "card"}, heading, values, place);
    cards.set(key, {element, place, values, height, drawn: ""});
    place.addEventListener("keydown", event => walk(event, place.chart));
    new ResizeObserver(() => place.chart?.setSize({width: place.clientWidth, height})).observe(place);
  }
  const entry = cards.get(key);
  entry.parent = parent;
  return entry;
}

/** Arrow keys move the cursor of a chart. */
function walk(event, chart) {
  const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!step || !chart) return;
  event.preventDefault();
  const points = chart.data[0];
  const index = Math.min(points.length - 1, Math.max(0, (chart.cursor.idx ?? points.length - (step < 0 ? 0 : 1)) + step));
  chart.setCursor({left: chart.valToPos(points[index], "x"), top: 10});
}

function draw(entry, title, data, series, extra, tell) {
  const wanted = JSON.stringify([data, series.map(({label, stroke, fill}) => [label, stroke, fill])]);
  const told = chart => tell(entry, chart.cursor.idx ?? null);
  if (entry.drawn !== wanted) {
    entry.place.chart?.destroy();
    entry.place.replaceChildren();
    entry.place.chart = new uPlot({
      width: entry.place.clientWidth || 320, height: entry.height, legend: {show: false},
      cursor: {sync: {key: together.key}, points: {size: 6}, drag: {x: false, y: false}},
      series: [{label: "iteration"}, ...series],
      axes: [axis({values: iterations, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]}),
        axis({size: 60, values: (_, splits) => splits.map(split => number(split, 3))})],
      hooks: {setCursor: [told]}, ...extra,
    }, data, entry.place);
    entry.drawn = wanted;
  }
  told(entry.place.chart);
  const last = series.map(({label}, index) => `${label} ${number(newest(data[index + 1]))}`).join(", ");
  entry.place.setAttribute("aria-label", `${title}: ${last} at the end`);
}

const newest = values => values.findLast(value => value !== null && value !== undefined) ?? null;

function curve(parent, key, title, drawn, sparse) {
  const x = [...new Set(drawn.flatMap(({view}) => view.metrics.iteration))].sort((a, b) => a - b);
  const data = [x, ...drawn.map(({view}) => {
    const values = new Map(view.metrics.iteration.map((iteration, row) => [iteration, view.metrics[key][row]]));
    return x.map(iteration => values.get(iteration) ?? null);
  })];
  const series = drawn.map(({view, index}) => ({label: view.name, stroke: color(index), width: 1.8, spanGaps: sparse,
    points: {show: sparse || x.length < 50, size: 5, fill: color(index)}}));
  const entry = card(parent, key, title, 170);
  draw(entry, title, data, series, {
    scales: {x: {time: false, range: () => x.length === 1 ? [x[0] - 1, x[0] + 1] : [x[0], x.at(-1)]},
      y: {range: (_, low, high) => range(low, high)}},
  }, ({values}, at) => values.replaceChildren(make("span", {className: "dim"}, at === null ? "last" : `it ${x[at]}`),
    ...drawn.map(({index}, row) => make("span", {}, dot(index),
      number(at === null ? newest(data[row + 1]) : data[row + 1][at])))));
  return entry;
}

function seconds(parent, view, stages) {
  const present = stages.filter(stage => view.metrics[stage]);
  const rows = view.metrics.iteration.map((_, row) => row).filter(row => present.some(key => view.metrics[key][row] !== null));
  const x = rows.map(row => view.metrics.iteration[row]);
  const own = present.map(key => rows.map(row => view.metrics[key][row] ?? 0));
  const stacked = own.map((_, first) => x.map((_, row) => own.slice(first).reduce((sum, values) => sum + values[row], 0)));
  const title = `${view.name}: seconds by stage`;
  const entry = card(parent, `seconds of ${view.name}`, title, 240);
  entry.stages = present.map((stage, number) => ({name: stage.slice(TIME.length), y: own[number]}));
  const bars = uPlot.paths.bars({size: [0.8, 40]});
  const series = present.map(stage => ({label: stage.slice(TIME.length), stroke: color(stages.indexOf(stage)),
    fill: color(stages.indexOf(stage)), width: 0, paths: bars, points: {show: false}}));
  draw(entry, title, [x, ...stacked], series, {
    scales: {x: {time: false, range: () => [x[0] - 0.6, x.at(-1) + 0.6]}, y: {range: (_, low, high) => [0, (high || 1) * 1.05]}},
  }, ({values}, at) => {
    const of = at === null ? x.map((_, row) => row).slice(-SHARES_OVER) : [at];
    const means = own.map(stage => of.reduce((sum, row) => sum + stage[row], 0) / of.length);
    const total = means.reduce((sum, value) => sum + value, 0) || 1;
    values.replaceChildren(
      make("span", {className: "dim"}, at === null ? `mean of the last ${of.length}` : `it ${x[at]}`),
      ...present.map((stage, row) => make("span", {}, dot(stages.indexOf(stage)),
        `${stage.slice(TIME.length)} ${number(means[row], 2)} s, ${Math.round(100 * means[row] / total)} %`)));
  });
  return entry;
}

/** Draw what runs have in common and what only some have; `drawn` are {view, index}, index gives the colour. */
export function show(drawn) {
  const titles = new Map(drawn.flatMap(({view}) => Object.entries(view.titles)));
  const stages = [...titles.keys()].filter(key => key.startsWith(TIME) && !titles.get(key));
  const shown = new Map([["curves", []], ["seconds", []]]);
  for (const [key, title] of titles) {
    const having = drawn.filter(({view}) => view.metrics[key]?.some(value => value !== null));
    if (having.length && !stages.includes(key)) shown.get("curves").push(curve("curves", key, title, having, /^val(-core)?\//.test(key)));
  }
  for (const {view} of drawn) {
    if (stages.some(stage => view.metrics[stage]?.some(value => value !== null))) shown.get("seconds").push(seconds("seconds", view, stages));
  }
  at("time").hidden = drawn.length > 0 && drawn.every(({view}) => view.state === "fit");
  for (const [parent, entries] of shown) {
    const elements = entries.length ? entries.map(({element}) => element) : [nothing[parent]];
    const now = [...at(parent).children];
    if (now.length !== elements.length || now.some((element, place) => element !== elements[place])) {
      at(parent).replaceChildren(...elements);
    }
  }
}

export function redraw() {
  for (const {place} of cards.values()) place.chart?.redraw(false, true);
}
