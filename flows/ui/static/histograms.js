/* Histograms of the scores and the lengths of listed answers. A bar, clicked, lists only its answers. */

import {at, make, number} from "ui/dom";

export const BARS = 24;
const WIDEST = 40;  // pixels of a bar
const KINDS = [["scores", "score", "low", "high"], ["lengths", "tokens", "shortest", "longest"]];

/** The bars of some values: each value if they are few, or so many of equal width. */
export function bars(values) {
  const known = values.filter(value => value !== null);
  const counts = new Map();
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const span = known.reduce((a, b) => Math.max(a, b), -Infinity) - low;
  const few = new Set(known).size <= BARS;
  for (const value of known) {
    const place = few ? value : Math.min(BARS - 1, Math.floor(BARS * (value - low) / span));
    const bar = counts.get(place);
    counts.set(place, {low: Math.min(value, bar?.low ?? value), high: Math.max(value, bar?.high ?? value), count: 1 + (bar?.count ?? 0)});
  }
  return [...counts.values()].sort((a, b) => a.low - b.low);
}

/** Draw the histograms of an answer of the source; `narrow` is called with the changes of the filter. */
export function show(answer, narrow) {
  at("histograms").replaceChildren(...KINDS.map(([key, unit, from, to]) => {
    const drawn = answer[key];
    const most = drawn.reduce((most, {count}) => Math.max(most, count), 0);
    const buttons = drawn.map(({low, high, count}, place) => {
      const range = low === high ? number(low) : `${number(low)} to ${number(high)}`;
      const text = `${unit} ${range}: ${count === 1 ? "1 answer" : `${count} answers`}`;
      const button = make("button", {type: "button", title: text, "aria-label": text, tabIndex: place ? -1 : 0}, make("i"));
      button.firstChild.style.height = `${Math.max(2, 100 * count / most)}%`;
      button.onclick = () => narrow({[from]: String(low), [to]: String(high)});
      return button;
    });
    const group = make("div", {className: "bars", role: "group", "aria-label": `histogram of ${key}`}, ...buttons);
    group.onkeydown = event => {
      const next = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!next) return;
      event.preventDefault();
      buttons[Math.min(buttons.length - 1, Math.max(0, buttons.indexOf(document.activeElement) + next))].focus();
    };
    const ends = make("div", {className: "dim ends"}, make("span", {}, number(drawn[0]?.low)), make("span", {}, key),
      make("span", {}, number(drawn.at(-1)?.high)));
    const histogram = make("div", {hidden: drawn.length < 2}, group, ends);
    histogram.style.maxWidth = `${WIDEST * drawn.length}px`;
    return histogram;
  }));
}
