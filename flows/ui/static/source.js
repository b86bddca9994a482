/* Where the page's data comes from: the server of `ratchet ui`, or the report's own file. */

import {bars} from "ui/histograms";

const TRIES = 10;  // of a request while the server has too many

class Server {
  live = true;
  #views = new Map();

  async #ask(path, parameters, signal, tries = TRIES) {
    const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`, {cache: "no-cache", signal});
    if (answer.status === 503 && tries > 1) {
      await new Promise(done => setTimeout(done, 1000 * Number(answer.headers.get("retry-after"))));
      return this.#ask(path, parameters, signal, tries - 1);
    }
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({error: `the server answered ${answer.status}`}));
      throw new Error(said.error);
    }
    return answer;
  }

  async runs() {
    return (await this.#ask("runs", {})).json();
  }

  /** A run; the same object as before if nothing was committed since. */
  async run(name) {
    const answer = await this.#ask("run", {run: name});
    const tag = answer.headers.get("etag");
    const before = this.#views.get(name);
    if (before?.tag !== tag) this.#views.set(name, {tag, view: await answer.json()});
    return this.#views.get(name).view;
  }

  /** Trajectories that match a filter. The server ends the search when the signal aborts the request. */
  async trajectories(run, filter, signal) {
    return (await this.#ask("trajectories", {run, ...filter}, signal)).json();
  }

  async trajectory(run, iteration, id) {
    return (await this.#ask("trajectory", {run, iteration, id})).json();
  }

  /** The address of an image, or of a small copy. */
  image(run, digest, isThumbnail = false) {
    return `images/${encodeURIComponent(digest)}?${new URLSearchParams(isThumbnail ? {run, size: "thumbnail"} : {run})}`;
  }
}

/** Tokens, or characters where the tokens are unknown. */
const size = ({length, response}) => length ?? response.length;

const ORDERS = {
  best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
  longest: (a, b) => size(b) - size(a),
  shortest: (a, b) => size(a) - size(b),
  newest: (a, b) => b.iteration - a.iteration || ORDERS.best(a, b),
};

const THUMBNAILS = 4;  // of a trajectory in a list

/** A trajectory as it is in a list. */
const line = trajectory => ({...trajectory, images: trajectory.images.slice(0, THUMBNAILS).map(({digest}) => digest),
  more_images: trajectory.images.slice(THUMBNAILS).length});

class Report {
  live = false;

  constructor(data) {
    this.written = data.written;
    this.all = data.runs;
    this.images = data.images;
  }

  /** An image of the report, as a data URL; null if it was left out. */
  image(run, digest) {
    return this.images[digest] ?? null;
  }

  #of(name) {
    const run = this.all.find(({view}) => view.name === name);
    if (!run) throw new Error(`there is no run ${name} in this report`);
    return run;
  }

  async runs() {
    return this.all.map(({view}) => ({name: view.name, url: view.url, state: view.state, iteration: view.closed,
      iterations: view.iterations, best_validation: null, age_s: null, recipe: "", parent: "", problem: ""}));
  }

  async run(name) {
    return this.#of(name).view;
  }

  async trajectories(name, {iteration, order, low, high, shortest, longest, text, prompt_id, like}) {
    const all = this.#of(name).trajectories;
    const prompt = like && all.find(trajectory => trajectory.id === like)?.prompt;
    const lines = all.filter(trajectory =>
      (!iteration || trajectory.iteration === Number(iteration)) && (!low || trajectory.score >= Number(low))
      && (!high || trajectory.score <= Number(high)) && (!shortest || trajectory.length >= Number(shortest))
      && (!longest || (trajectory.length !== null && trajectory.length <= Number(longest))) && (!prompt_id || trajectory.prompt_id === prompt_id)
      && (!like || trajectory.prompt === prompt)
      && [trajectory.prompt, trajectory.response, trajectory.ground_truth]
        .some(part => part.toLowerCase().includes((text ?? "").toLowerCase()))
    ).sort((a, b) => ORDERS[order || "best"](a, b) || b.iteration - a.iteration || (a.id < b.id ? -1 : 1));
    return {lines: lines.map(line), scores: bars(lines.map(({score}) => score)), lengths: bars(lines.map(({length}) => length).filter(length => length !== null)),
      matching: lines.length, total: all.length, damages: []};
  }

  async trajectory(name, iteration, id) {
    const trajectory = this.#of(name).trajectories.find(trajectory => trajectory.id === id);
    if (!trajectory) throw new Error(`this report has no trajectory ${id} of ${name}`);
    return trajectory;
  }
}

const embedded = document.getElementById("data");
export const source = embedded ? new Report(JSON.parse(embedded.textContent)) : new Server();
