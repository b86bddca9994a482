/* What happened in a trajectory, turn by turn: who said what, which tools were called, and how long each part took. */

import {duration, make, number} from "ui/dom";

const FOLDED = 600;  // characters from which on what the policy did not write is folded
const FOLDED_CALL = 240;  // those of a call and its answer
const KINDS = [["model_s", "model"], ["tool_s", "tool"], ["waiting_s", "waiting"]];

/** Seconds by kind. An answer that an earlier process measured has only its whole. */
function parts(turn) {
  const known = KINDS.map(([key, name]) => [name, turn[key]]).filter(([, value]) => value !== null);
  const whole = turn.model_s === null && turn.answered_s !== null ? [["answered", turn.answered_s]] : [];
  return [...whole, ...known];
}

const length = turn => parts(turn).reduce((sum, [, value]) => sum + value, 0);
const told = seconds => seconds.map(([name, value]) => `${name} ${duration(value)}`);

/** All conversations of a trajectory; `choose` opens another one, if it is given. */
export function timeline({conversations, errors}, id, choose) {
  const turns = conversations.flatMap(({turns}) => turns);
  const whole = Math.max(...turns.map(turn => (turn.start_s ?? 0) + length(turn)), 0);
  const totals = {};
  for (const turn of turns) for (const [name, value] of parts(turn)) totals[name] = (totals[name] ?? 0) + value;
  const legend = Object.entries(totals).map(([name, value]) =>
    make("span", {}, make("i", {className: `kind ${name}`, "aria-hidden": "true"}), `${name} ${duration(value)}`));
  const measured = legend.length ? legend : ["the run did not store how long its turns took"];
  return make("section", {className: "timeline", "aria-label": "timeline"},
    make("div", {className: "dim totals"}, ...measured),
    ...conversations.flatMap(conversation => [
      ...(conversations.length > 1 ? [heading(conversation, id, choose)] : []),
      make("ol", {className: "turns"}, ...conversation.turns.map((one, index) => turn(one, index, whole)))]),
    ...errors.map(text => make("p", {role: "alert"}, text)));
}

function heading({id: name, turns}, id, choose) {
  const facts = `${turns.length} ${turns.length === 1 ? "turn" : "turns"}`;
  const own = name === id ? make("strong", {}, name) : name;
  if (name === id || !choose) return make("div", {className: "conversation"}, own, make("span", {className: "dim"}, facts));
  const open = make("button", {type: "button"}, name);
  open.onclick = () => choose(name);
  return make("div", {className: "conversation"}, open, make("span", {className: "dim"}, facts));
}

function turn(one, index, whole) {
  const facts = [`turn ${index + 1}`, ...(one.tokens === null ? [] : [`${one.tokens} tokens`]), ...told(parts(one)),
    ...(one.reward === null ? [] : [`reward ${number(one.reward)}`])];
  return make("li", {},
    ...one.heard.map(([role, content]) => heard(role, content)),
    make("div", {className: "dim facts"}, facts.join(" · ")), ...track(one, whole),
    make("pre", {className: "policy"}, one.text || (one.calls.length ? "" : "(empty)")),
    ...one.calls.map(call),
    ...(one.answer === null ? [] : [heard("environment", one.answer)]));
}

/** Where the turn is in the time of the whole trajectory. */
function track(one, whole) {
  if (!whole || !parts(one).length) return [];
  let at = one.start_s ?? 0;
  const segments = parts(one).map(([name, value]) => {
    const segment = make("i", {className: `kind ${name}`, title: `${name} ${duration(value)}`});
    segment.style.left = `${100 * at / whole}%`;
    segment.style.width = `${100 * value / whole}%`;
    at += value;
    return segment;
  });
  return [make("div", {className: "track", role: "img", "aria-label": told(parts(one)).join(", ")}, ...segments)];
}

/** What the policy read; folded if it is long. */
function heard(role, content) {
  const text = make("pre", {}, content);
  if (content.length <= FOLDED) return make("div", {className: "heard"}, make("span", {className: "dim"}, role), text);
  return make("details", {className: "heard"},
    make("summary", {className: "dim"}, `${role}: ${content.slice(0, 80)}… (${content.length} characters)`), text);
}

/** A call of a tool, with its answer; folded if they are long. */
function call({name, arguments: given, answer}) {
  const short = given.length <= 80 ? given : `${given.slice(0, 80)}…`;
  const open = given.length + (answer ?? "").length <= FOLDED_CALL;
  const said = answer === null ? [] : [make("span", {className: "dim"}, "answer"), make("pre", {}, answer)];
  return make("details", {className: "call", open},
    make("summary", {}, make("span", {className: "name"}, name), ` ${short}`),
    ...(short === given ? [] : [make("span", {className: "dim"}, "arguments"), make("pre", {}, given)]), ...said);
}
