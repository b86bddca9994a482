/* A plot on a canvas: lines or stacked bars over iterations, two axes, and a cursor that all plots share. */

import {color, make, number} from "ui/dom";

const LEFT = 60;
const RIGHT = 8;
const TOP = 6;
const BOTTOM = 26;
const plots = new Set();
let cursor = null;  // a value, and what it counts

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Put the cursor of all plots over the same unit at a value, or nowhere. */
export function pointAt(value, unit = "") {
  cursor = value === null ? null : {value, unit};
  for (const plot of plots) plot.point();
}

/** Draw all plots again, such as in other colours. */
export function redraw() {
  for (const plot of plots) plot.draw();
}

/** At most so many round numbers in a range, as texts that differ; `least` is the smallest distance. */
function ticks([low, high], most, least) {
  const distance = Math.max((high - low) / most, least);
  const power = 10 ** Math.floor(Math.log10(distance));
  const step = [1, 2, 5, 10].find(factor => factor * power >= distance) * power;
  const digits = Math.max(3, 1 + Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step)));
  const first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step) - first + 1}, (_, place) => (first + place) * step)
    .map(value => ({value, text: number(value, digits)}));
}

/** Powers of ten in a range, and the range's ends where there are fewer than two. */
function powers([low, high]) {
  const first = Math.ceil(Math.log10(low));
  const between = Array.from({length: Math.max(0, Math.floor(Math.log10(high)) - first + 1)}, (_, place) => 10 ** (first + place));
  return (between.length < 2 ? [low, ...between, high] : between).map(value => ({value, text: number(value, 2)}));
}

export class Plot {
  x = [];
  series = [];

  constructor(place, height) {
    Object.assign(this, {place, height});
    this.canvas = make("canvas");
    this.line = make("div", {className: "cursor"});
    place.append(this.canvas, this.line);
    const point = ({clientX}) => pointAt(this.nearest(this.value(clientX - place.getBoundingClientRect().left)), this.unit);
    place.onpointermove = point;
    place.onpointerleave = () => pointAt(null);
    place.onkeydown = event => this.walk(event);
    place.onclick = event => {
      point(event);  // a tap has left before it is a click
      this.pick(event.clientY - place.getBoundingClientRect().top);
    };
    new ResizeObserver(() => this.draw()).observe(place);
    plots.add(this);
  }

  /**
   * Show other data. `series` have a label, a number (of their colour) and a value, or null, for each of `x`. Lines
   * with `dots` go on over nulls, and so do `joined` ones; `bars` are stacked. A series may have other values, which are
   * drawn `faint`, and bounds `low` and `high`. `marks` have an x and a number. `xs` and `ys` are the ranges of the axes; that of y may be logarithmic. `unit` is what `x` counts.
   */
  show({x, series, marks = [], xs, ys, dots = false, bars = false, joined = false, log = false, unit = ""}) {
    Object.assign(this, {x, series, marks, xs, ys, dots, bars, joined, log, unit});
    this.draw();
  }

  /** The index of the iteration at the cursor. */
  get index() {
    return cursor?.unit !== this.unit || !this.x.length ? null : this.x.indexOf(this.nearest(cursor.value));
  }

  nearest(value) {
    return this.x.reduce((best, x) => Math.abs(x - value) < Math.abs(best - value) ? x : best, this.x[0] ?? null);
  }

  get width() {
    return this.place.clientWidth - LEFT - RIGHT;
  }

  left(x) {
    return LEFT + (x - this.xs[0]) / (this.xs[1] - this.xs[0]) * this.width;
  }

  top(y) {
    const [low, high, value] = [...this.ys, y].map(this.log ? Math.log10 : Number);
    return TOP + (high - value) / (high - low) * (this.height - TOP - BOTTOM);
  }

  value(left) {
    return this.xs[0] + (left - LEFT) / this.width * (this.xs[1] - this.xs[0]);
  }

  /** Tell of the point at the cursor whose line is the nearest to a height. */
  pick(height) {
    const at = this.index;
    if (at === null || !this.picked) return;
    const far = ({values}) => values[at] === null ? Infinity : height === null ? 0 : Math.abs(this.top(values[at]) - height);
    const line = this.series.reduce((best, one, place) => far(one) < far(this.series[best]) ? place : best, 0);
    this.picked(at, line);
  }

  /** Arrow keys move the cursor; Enter picks its point, of the first line. */
  walk(event) {
    if (event.key === "Enter") this.pick(null);
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step || !this.x.length) return;
    event.preventDefault();
    const from = this.index ?? this.x.length - (step < 0 ? 0 : 1);
    pointAt(this.x[Math.min(this.x.length - 1, Math.max(0, from + step))], this.unit);
  }

  /** Show where the cursor is, and call `told` with the index of its iteration, or null. */
  point() {
    const at = this.index;
    this.line.hidden = at === null;
    if (at !== null) {
      this.line.style.left = `${this.left(this.x[at])}px`;
      this.line.replaceChildren(...this.bars ? [] : this.series.filter(({values}) => values[at] !== null).map(one => {
        const mark = make("i");
        mark.style.top = `${this.top(one.values[at]) - TOP}px`;
        mark.style.background = color(one.number);
        return mark;
      }));
    }
    this.told?.(at);
  }

  draw() {
    if (this.width <= 0 || !this.x.length) return;
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(this.place.clientWidth * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.drawAxes(pen);
    const below = this.x.map(() => 0);
    this.drawMarks(pen);
    for (const {number, values, faint, low, high} of this.series) {
      pen.fillStyle = pen.strokeStyle = color(number);
      if (low) this.drawBounds(pen, low, high);
      if (this.bars) this.drawBars(pen, values, below);
      else this.drawLine(pen, values);
      if (!faint) continue;
      pen.globalAlpha = 0.25;
      this.drawLine(pen, faint);
      pen.globalAlpha = 1;
    }
    this.point();
  }

  drawAxes(pen) {
    const bottom = this.height - BOTTOM;
    const right = this.place.clientWidth - RIGHT;
    Object.assign(pen, {font: "11px system-ui, sans-serif", strokeStyle: style("--grid"), fillStyle: style("--dim")});
    pen.beginPath();
    Object.assign(pen, {textAlign: "center", textBaseline: "top"});
    for (const {value, text} of ticks(this.xs, this.width / 50, 1)) {
      pen.moveTo(this.left(value), TOP);
      pen.lineTo(this.left(value), bottom + 4);
      pen.fillText(text, this.left(value), bottom + 8);
    }
    Object.assign(pen, {textAlign: "right", textBaseline: "middle"});
    for (const {value, text} of this.log ? powers(this.ys) : ticks(this.ys, this.height / 35, 0)) {
      pen.moveTo(LEFT - 4, this.top(value));
      pen.lineTo(right, this.top(value));
      pen.fillText(text, LEFT - 8, this.top(value), LEFT - 10);
    }
    pen.stroke();
  }

  /** A triangle and a line where something begins. */
  drawMarks(pen) {
    for (const {x, number} of this.marks) {
      const left = this.left(x);
      Object.assign(pen, {strokeStyle: style("--bad"), fillStyle: color(number), lineWidth: 1});
      pen.beginPath();
      pen.setLineDash([3, 3]);
      pen.moveTo(left, TOP);
      pen.lineTo(left, this.height - BOTTOM);
      pen.stroke();
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(left - 5, TOP);
      pen.lineTo(left + 5, TOP);
      pen.lineTo(left, TOP + 8);
      pen.fill();
    }
  }

  drawBounds(pen, low, high) {
    pen.lineWidth = 1;
    pen.beginPath();
    this.x.forEach((x, row) => {
      if (low[row] === null) return;
      pen.moveTo(this.left(x), this.top(low[row]));
      pen.lineTo(this.left(x), this.top(high[row]));
    });
    pen.stroke();
  }

  drawLine(pen, values) {
    const points = values.map((y, row) => y === null ? null : [this.left(this.x[row]), this.top(y)]);
    pen.lineWidth = 1.8;
    pen.beginPath();
    let isOpen = false;
    for (const point of points) {
      if (point) pen[isOpen ? "lineTo" : "moveTo"](...point);
      isOpen = point !== null || (isOpen && (this.dots || this.joined));
    }
    pen.stroke();
    if (!this.dots && points.length >= 50) return;
    for (const point of points.filter(Boolean)) {
      pen.beginPath();
      pen.arc(...point, 2.5, 0, 2 * Math.PI);
      pen.fill();
    }
  }

  /** Draw bars on top of those `below`, which then include them. */
  drawBars(pen, values, below) {
    const wide = Math.min(40, 0.8 * (this.left(1) - this.left(0)));
    values.forEach((y, row) => {
      pen.fillRect(this.left(this.x[row]) - wide / 2, this.top(below[row] + y), wide, this.top(below[row]) - this.top(below[row] + y));
      below[row] += y;
    });
  }
}
