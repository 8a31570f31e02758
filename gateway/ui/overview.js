// What is told each second beside the fleet: verdict, key figures, hit rate, first tokens, requests, tenants, configuration.

import { parts, range, shares } from "/ui/charts.js";
import { NOTHING, at, bytes, clock, count, el, mark, ms, percent, put, say, span, table } from "/ui/dom.js";
import { list, states } from "/ui/fleet.js";

const WORDS = { ok: "The fleet is well", warn: "The fleet serves, but look at this", bad: "Something is wrong" };
const HITS = [
  ["none", "under 10 %"], ["some", "10 to 50 %"], ["most", "50 to 90 %"], ["all", "over 90 %"], ["unknown", "not known"],
];
const KINDS = ["g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"];
const ROWS = 40, EACH = 10;
const STEP = 2;
const points = [];
let paused = false;

export function startOverview(openSession) {
  at("requests-pause").addEventListener("click", () => {
    paused = !paused;
    mark(at("requests-pause"), "aria-pressed", paused);
    say(at("requests-pause"), paused ? "Go on" : "Pause");
  });
  put(at("requests-table"), table("Some of the requests that ended", REQUESTS(openSession).map(([title, kind]) => [title, kind]), []));
  flow = REQUESTS(openSession);
}

export function drawOverview(told) {
  verdict(told.verdict);
  remember(told);
  figures(told);
  cache(told);
  firstTokens(told.ttft);
  requests(told);
  config(told);
}

function verdict({ level, lines }) {
  mark(at("verdict"), "data-level", level);
  say(at("verdict-word"), WORDS[level]);
  const words = lines.map((line) => `${line.level}|${line.text}`).join("\n");
  if (at("verdict-lines").dataset.told === words) return;
  at("verdict-lines").dataset.told = words;
  put(at("verdict-lines"), lines.map((line) => el("li", { "data-level": line.level }, line.text)));
}

// What earlier watchers saw comes with the first event.
function remember(told) {
  const last = points.length ? points[points.length - 1].time : 0;
  for (const point of told.history ?? []) if (point.time > last) points.push(point);
  if (points.length > 1 && points[points.length - 1].time - points[points.length - 2].time < STEP) points.pop();
  points.push({ time: told.time, ...told.hits });
  while (points.length > 400) points.shift();
}

function figures(told) {
  const all = states();
  const ready = all.filter((state) => state === "ready").length;
  const { hits, ttft, requests: asked, queue, pressure, sessions } = told;
  const rate = told.window_seconds ? asked.window / told.window_seconds : null;
  const rows = [
    ["Hit rate", percent(hits.rate), hits.ceiling === null ? `predicted ${percent(hits.predicted)}` : `of ${percent(hits.ceiling)} that could be`],
    ["First token", ms(ttft.all?.p50), `p99 ${ms(ttft.all?.p99)}`],
    ["Requests", rate === null ? NOTHING : `${rate >= 100 ? rate.toFixed(0) : rate.toFixed(1)} /s`, `${asked.failed} failed`, asked.failed ? "bad" : null],
    ["In flight", count(asked.running), `${count(sessions.total)} sessions`],
    ["Waiting", count(queue.waiting), queue.waiting ? bytes(queue.bytes) : "nobody waits", queue.waiting ? "warn" : null],
    ["Workers", `${ready}/${all.length}`, ready === all.length ? "all ready" : "ready", ready === all.length ? null : "warn"],
    ["Pressure", pressure.rung, `loop ${ms(pressure.lag_ms)} late`, pressure.rung === "none" ? null : "warn"],
  ];
  const place = at("figures");
  if (place.children.length !== rows.length) {
    put(place, rows.map(() => el("div", {}, el("dt"), el("dd"), el("dd", { class: "quiet" }))));
  }
  rows.forEach(([name, value, note, level], n) => {
    const [title, big, small] = place.children[n].children;
    say(title, name); say(big, value); say(small, note);
    mark(place.children[n], "data-level", level ?? null);
  });
}

function cache(told) {
  const { rate, predicted, best, ceiling } = told.hits;
  say(at("cache-window"), told.window_seconds ? `last ${span(told.window_seconds)}, by tokens` : "");
  const series = [
    { name: "found", kind: "found", read: (point) => point.rate },
    { name: "predicted", kind: "predicted", read: (point) => point.predicted },
  ];
  if (ceiling !== null || points.some((point) => (point.ceiling ?? null) !== null)) {
    series.push({ name: "ceiling", kind: "ceiling", read: (point) => point.ceiling });
  }
  shares(at("cache-chart"), points, series);
  const found = rate ?? predicted;
  if (found === null) { parts(at("cache-why"), [], "No prompt was answered in this time."); return; }
  const routing = best === null || predicted === null ? null : Math.min(1 - found, Math.max(0, best - predicted));
  const eviction = ceiling === null || best === null ? null : Math.min(1 - found - (routing ?? 0), Math.max(0, ceiling - best));
  const rest = Math.max(0, 1 - found - (routing ?? 0) - (eviction ?? 0));
  parts(at("cache-why"), [
    { name: "found", kind: "found", share: found, title: "Prompt tokens that engines found in their caches" },
    { name: "lost to routing", kind: "routing", share: routing, title: "Another engine held it" },
    { name: "lost to eviction", kind: "eviction", share: eviction, title: "A cache without bounds would still have it" },
    { name: ceiling === null ? "computed" : "new", kind: "cold", share: rest, title: "Never seen before, or changed: the doctor tells more" },
  ], "");
}

function firstTokens(ttft) {
  const rows = HITS.filter(([hit]) => ttft.by_hit[hit]).map(([hit, name]) => ({ name, ...ttft.by_hit[hit] }));
  if (!rows.length) { put(at("ttft-table"), el("p", { class: "quiet" }, "No stream began in this time.")); return; }
  const known = HITS.some(([hit]) => hit !== "unknown" && ttft.by_hit[hit]);
  if (ttft.all && (rows.length > 1 || !known)) rows.push({ name: "all requests", ...ttft.all });
  const shown = known ? rows : rows.slice(-1);
  const least = Math.min(...shown.map((row) => row.p50)) / 1.5 || 1, most = Math.max(...shown.map((row) => row.p99), least * 4) * 1.1;
  put(at("ttft-table"), table("Time to first token", [
    ["Found", "", (row) => row.name],
    ["Requests", "number extra", (row) => count(row.requests)],
    ["p50", "number", (row) => ms(row.p50)],
    ["p90", "number extra", (row) => ms(row.p90)],
    ["p99", "number", (row) => ms(row.p99)],
    ["", "stretch", (row) => range(row, Math.max(least, 0.01), most)],
  ], shown));
}

let flow = [];
const REQUESTS = (openSession) => [
  ["Time", "number extra", (row) => clock(row.time)],
  ["Tenant, model", "extra", (row) => `${row.tenant === "anonymous" ? "" : `${row.tenant} · `}${row.model}`],
  ["Session", "", (row) => (row.session ? el("button", { type: "button", class: "link", title: `request ${row.id}`, onclick: () => openSession(row.session) }, row.session.slice(0, 8)) : NOTHING)],
  ["Turn", "number extra", (row) => row.turn ?? NOTHING],
  ["Target", "", (row) => (row.prefill ? `${row.prefill} → ${row.target}` : row.target ?? NOTHING)],
  ["Reason", "", (row) => el("span", { title: row.policy }, row.reason ?? NOTHING)],
  ["Prompt", "number extra", (row) => count(row.prompt_tokens)],
  ["Found", "number", (row) => percent(row.prompt_tokens && row.cached_tokens !== null ? row.cached_tokens / row.prompt_tokens : null)],
  ["First token", "number", (row) => ms(row.ttft_ms)],
  ["", "", (row) => (row.outcome === "ok" ? "" : el("span", { class: "tag bad" }, `${row.status ?? ""} ${row.outcome}`))],
];

function requests(told) {
  const { reasons, shown, ended } = told.requests;
  const total = Object.values(reasons).reduce((sum, number) => sum + number, 0);
  const most = Object.entries(reasons).slice(0, KINDS.length);
  parts(at("reasons"), most.map(([name, number], n) => ({ name, kind: KINDS[n], share: number / total })), "Nothing was routed in this time.");
  if (paused) return;
  const few = shown.length <= EACH ? shown : shown.filter((_, n) => n % Math.ceil(shown.length / EACH) === 0);
  say(at("requests-count"), ended ? `${few.length} of the ${ended} that ended in the last second` : "none ended in the last second");
  const body = at("requests-table").querySelector("tbody");
  for (const row of few) {
    body.prepend(el("tr", {}, flow.map(([, kind, cell]) => el("td", { class: kind }, cell(row)))));
  }
  while (body.children.length > ROWS) body.lastChild.remove();
}

function config({ config: told, queue, pressure }) {
  const shown = JSON.stringify([told, queue, pressure.rung, bytes(pressure.memory_bytes)]);
  const place = at("config-told");
  if (place.dataset.told === shown) return;
  place.dataset.told = shown;
  const errors = (told.last_error ?? []).map((problem) => el("li", {}, `${problem.line ? `line ${problem.line}, ` : ""}${problem.key}: ${problem.message}`));
  put(place, list([
    ["generation", `${told.generation}${told.reloaded_at ? `, followed at ${clock(told.reloaded_at)}` : ", as it was started"}`],
    ["last reload", told.last_reload_ok ? "nothing wrong" : "not followed"],
    ["needs a restart", (told.needs_restart ?? []).join(", ") || "nothing"],
    ["waiting", Object.entries(queue.by_priority).map(([name, number]) => `${name} ${number}`).join(", ")],
    ["token ids being made", queue.preparing],
    ["left out", pressure.rung === "none" ? "nothing" : pressure.rung],
    ["memory", `${bytes(pressure.memory_bytes)} of ${bytes(pressure.memory_limit_bytes)}`],
  ]), errors.length ? el("h3", { class: "error" }, "Why the last reload was not followed") : null, el("ul", { class: "plain error" }, errors));
}
