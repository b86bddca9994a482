/* Curves of metrics over iterations, and bars of the time that stages take. */

import {at, dot, make, number} from "ui/dom";
import {Plot} from "ui/plot";

const TIME = "timing_s/";
const SHARES_OVER = 10;
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
 * stands above the plot, for the iteration of an index or, with null, for the end.
 */
function card(key, title, height, data, tell) {
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

function curve(key, title, drawn, dots) {
  const x = [...new Set(drawn.flatMap(({view}) => view.metrics.iteration))].sort((a, b) => a - b);
  const series = drawn.map(({view, index}) => {
    const values = new Map(view.metrics.iteration.map((iteration, row) => [iteration, view.metrics[key][row]]));
    return {label: view.name, number: index, values: x.map(iteration => values.get(iteration) ?? null)};
  });
  const xs = x.length === 1 ? [x[0] - 1, x[0] + 1] : [x[0], x.at(-1)];
  return card(key, title, 170, {x, series, xs, ys: range(series.flatMap(({values}) => values)), dots}, at => [
    make("span", {className: "dim"}, at === null ? "last" : `it ${x[at]}`),
    ...series.map(one => make("span", {}, dot(one.number), number(at === null ? newest(one.values) : one.values[at])))]);
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

/** Draw what runs have in common and what only some have; `drawn` are {view, index}, index gives the colour. */
export function show(drawn) {
  const titles = new Map(drawn.flatMap(({view}) => Object.entries(view.titles)));
  const stages = [...titles.keys()].filter(key => key.startsWith(TIME) && !titles.get(key));
  const shown = {curves: [], seconds: []};
  for (const [key, title] of titles) {
    const having = drawn.filter(({view}) => view.metrics[key]?.some(value => value !== null));
    if (having.length && !stages.includes(key)) shown.curves.push(curve(key, title, having, /^val(-core)?\//.test(key)));
  }
  for (const {view} of drawn) {
    if (stages.some(stage => view.metrics[stage]?.some(value => value !== null))) shown.seconds.push(seconds(view, stages));
  }
  at("time").hidden = drawn.length > 0 && drawn.every(({view}) => view.state === "fit");
  for (const [parent, cardsNow] of Object.entries(shown)) {
    const elements = cardsNow.length ? cardsNow : [nothing[parent]];
    const now = [...at(parent).children];
    if (now.length !== elements.length || now.some((element, place) => element !== elements[place])) {
      at(parent).replaceChildren(...elements);
    }
  }
}
