// The dry run: every candidate with what it would cost.

import { post } from "/ui/admin.js";
import { NOTHING, at, count, el, put, table } from "/ui/dom.js";

const EXAMPLE = { model: "", messages: [{ role: "user", content: "hi" }] };

export function startRoute() {
  at("route-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
}

// Until somebody writes something else, a body that this fleet would serve.
export function exampleFor(models) {
  const place = at("route-body");
  if (place.value || !models.length) return;
  place.value = JSON.stringify({ ...EXAMPLE, model: models[0] }, null, 1);
}

async function ask() {
  const more = {};
  const session = at("route-session").value.trim(), key = at("route-key").value.trim();
  if (session) more["x-session-id"] = session;
  if (key) more["x-warmroute-tenant-key"] = key;
  try {
    answer(await post(`/route?path=${encodeURIComponent(at("route-path").value)}`, at("route-body").value, more));
  } catch (error) {
    put(at("route-answer"), el("p", { class: "error" }, error.message));
  }
}

function answer(told) {
  const pair = told.pair ? `${told.pair.prefill} for the prompt, ${told.pair.decode} for the answer` : told.target;
  const session = told.session ? `, session ${told.session.id.slice(0, 12)} (by ${told.session.source ?? NOTHING}, ${told.session.turns} turns, home ${told.session.home ?? "none"})` : "";
  put(at("route-answer"),
    el("p", {}, "It would go to ", el("b", {}, pair), ", because of: ", el("b", {}, told.reason), ` (${told.decision}); ${count(told.prompt_tokens)} prompt tokens${session}.`),
    el("div", { class: "scroll" }, candidates(told)));
}

function candidates(told) {
  const rows = [...told.candidates].sort((one, other) => (one.total_ms ?? Infinity) - (other.total_ms ?? Infinity));
  const names = [...new Set(rows.flatMap((row) => Object.entries(row.terms ?? {}).filter(([, value]) => value).map(([name]) => name)))];
  const most = Math.max(...rows.map((row) => row.total_ms ?? 0), 0.001);
  const chosen = (row) => [told.target, told.pair?.prefill].includes(row.target);
  const number = (value) => (value === null || value === undefined ? NOTHING : value.toFixed(1));
  return table("Candidates, the cheapest first; milliseconds", [
    ["Target", "", (row) => (chosen(row) ? el("b", {}, `${row.target} ✓`) : row.target)],
    ["Total ms", "number", (row) => number(row.total_ms)],
    ["", "cost", (row) => cost(row, names, most)],
    ...names.map((name, n) => [el("span", {}, el("i", { class: `swatch g${n % 8}` }), name.replaceAll("_", " ")), "number", (row) => number(row.terms?.[name])]),
    ["Holds", "number", (row) => count(Object.values(row.holding_tokens).reduce((sum, tokens) => sum + tokens, 0))],
    ["In flight", "number", (row) => row.running],
    ["Homes", "number", (row) => row.homes],
  ], rows, (row) => ({ class: chosen(row) ? "chosen" : null }));
}

function cost(row, names, most) {
  return el("span", { class: "stack" }, names.map((name, n) => {
    const part = el("i", { class: `g${n % 8}` });
    part.style.width = `${(Math.max(0, row.terms?.[name] ?? 0) / most) * 100}%`;
    return part;
  }));
}
