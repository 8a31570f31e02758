// The fleet as tiles: made once, changed where something changed. How large they are depends on how many there are.

import { call } from "/ui/admin.js";
import { NOTHING, at, count, el, mark, ms, percent, put, say } from "/ui/dom.js";

const LARGE = 40, SMALL = 150;
const tiles = new Map();
let groups = [];
let show = () => {};

// `open(title, coming)` shows something in front of the page: a promise of nodes.
export function startFleet(open) {
  show = open;
  at("fleet-filter").addEventListener("input", filter);
  at("tiles").addEventListener("keydown", step);
  at("tiles").addEventListener("focusin", (event) => describe(event.target));
  at("tiles").addEventListener("mouseover", (event) => describe(event.target.closest("button")));
}

export function drawFleet(told) {
  const fleet = told.fleet;
  const regrouped = JSON.stringify(groups) !== JSON.stringify(told.groups);
  if (regrouped) {
    groups = told.groups;
    legend();
  }
  if (fleet.whole) for (const name of [...tiles.keys()]) if (!fleet.tiles.some((tile) => tile.name === name)) drop(name);
  fleet.gone.forEach(drop);
  for (const tile of fleet.tiles) draw(tile);
  const size = tiles.size <= LARGE ? "large" : tiles.size <= SMALL ? "small" : "tiny";
  mark(at("tiles"), "data-size", size);
  if (fleet.tiles.length || fleet.gone.length) { counts(); filter(); rove(); }
}

export const states = () => {
  const found = new Map();
  for (const { tile } of tiles.values()) found.set(tile.worker, tile.state);
  return [...found.values()];
};

function drop(name) {
  tiles.get(name)?.node.remove();
  tiles.delete(name);
}

function make(tile) {
  const parts = {
    name: el("b"), load: el("span", { class: "load" }), kv: el("i", { class: "fill" }), kvText: el("span", { class: "number" }),
    held: el("span", { class: "held" }), homes: el("span", { class: "number" }), foot: el("span", { class: "foot" }),
    alarm: el("span", { class: "alarm" }),
  };
  const button = el("button", { type: "button", tabindex: -1, "data-name": tile.name, onclick: () => open(tile.name) },
    el("span", { class: "head" }, el("i", { class: "dot" }), parts.name), parts.load,
    el("span", { class: "row kv" }, el("span", { class: "what" }, "KV"), el("span", { class: "meter" }, parts.kv), parts.kvText),
    el("span", { class: "row homes" }, el("span", { class: "what" }, "homes"), parts.held, parts.homes), parts.foot, parts.alarm);
  const node = el("li", {}, button);
  at("tiles").append(node);
  const made = { tile, node, button, parts };
  tiles.set(tile.name, made);
  return made;
}

function draw(tile) {
  const made = tiles.get(tile.name) ?? make(tile);
  const { button, parts } = made;
  made.tile = tile;
  const trouble = alarm(tile);
  say(parts.name, tile.name);
  mark(button, "data-state", tile.state);
  mark(button, "data-trouble", trouble ? "yes" : null);
  mark(button, "aria-label", `${tile.name}, ${tile.state}, ${tile.running} in flight`);
  say(parts.load, tile.state === "ready" || tile.running ? load(tile) : tile.state);
  parts.kv.style.width = parts.kv.style.height = "";
  parts.kv.style.setProperty("--share", tile.kv_usage ?? 0);
  say(parts.kvText, percent(tile.kv_usage));
  held(parts.held, tile);
  say(parts.homes, tile.homes ?? NOTHING);
  say(parts.foot, [tile.engine, tile.role === "unified" ? null : tile.role, tile.rung].filter(Boolean).join(" · "));
  say(parts.alarm, trouble ?? "");
}

function load(tile) {
  const queue = tile.queue === null || tile.queue === undefined ? "" : ` · ${tile.queue} queued`;
  return `${tile.running} in flight${queue}`;
}

function alarm(tile) {
  if (tile.state !== "ready") return tile.reason;
  if (tile.breaker_reason) return `breaker ${tile.breaker}: ${tile.breaker_reason}`;
  if (tile.rung === "session" || tile.rung === "none") return `believed: ${tile.rung} (${tile.rung_reason})`;
  if (tile.crowded) return "cache too small for what returns";
  return tile.share < 1 ? `slow start: ${percent(tile.share)}` : null;
}

// What its sessions hold, by group, against the size of its cache.
function held(place, tile) {
  const total = tile.groups.reduce((sum, [, tokens]) => sum + tokens, 0);
  const whole = Math.max(tile.kv_tokens ?? total, total, 1);
  const told = JSON.stringify([tile.groups, whole]);
  if (place.dataset.told === told) return;
  place.dataset.told = told;
  put(place, tile.groups.map(([group, tokens]) => {
    const part = el("i", { class: `g${group ?? "x"}` });
    part.style.width = `${(tokens / whole) * 100}%`;
    return part;
  }));
}

const named = (group) => `${group.tenant === "anonymous" ? "" : `${group.tenant} · `}${group.model}${group.start ? ` · #${group.start.slice(0, 4)}` : ""}`;

function legend() {
  put(at("fleet-groups"), groups.map((group) => el("li", {
    title: `Sessions of ${group.tenant} for ${group.model} whose prompts start alike: ${group.sessions}, with ${count(group.tokens)} tokens`,
  }, el("i", { class: `g${group.place}` }), named(group))));
}

function counts() {
  const found = new Map();
  for (const state of states()) found.set(state, (found.get(state) ?? 0) + 1);
  const words = [...found].sort().map(([state, number]) => `${number} ${state}`);
  say(at("fleet-count"), words.join(", ") || "no workers");
}

function filter() {
  const wanted = at("fleet-filter").value.trim().toLowerCase();
  for (const { tile, node } of tiles.values()) {
    const words = [tile.name, tile.state, tile.role, tile.rung, tile.engine, ...tile.models].join(" ").toLowerCase();
    const hide = wanted !== "" && !words.includes(wanted);
    if (node.hidden !== hide) node.hidden = hide;
  }
}

// One stop for the Tab key, arrows within.
function rove() {
  const buttons = [...tiles.values()].map((made) => made.button);
  if (!buttons.some((button) => button.tabIndex === 0) && buttons.length) buttons[0].tabIndex = 0;
}

function step(event) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up", Home: "first", End: "last" };
  const move = moves[event.key];
  if (move === undefined) return;
  const shown = [...tiles.values()].filter((made) => !made.node.hidden).map((made) => made.button);
  const from = shown.indexOf(document.activeElement);
  if (from < 0) return;
  event.preventDefault();
  const top = shown[0].offsetTop;
  const across = Math.max(1, shown.filter((button) => button.offsetTop === top).length);
  const to = { 1: from + 1, [-1]: from - 1, down: from + across, up: from - across, first: 0, last: shown.length - 1 }[move];
  const next = shown[Math.max(0, Math.min(shown.length - 1, to))];
  shown[from].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function describe(button) {
  const tile = tiles.get(button?.dataset?.name)?.tile;
  if (!tile) return;
  const words = [tile.name, tile.state, load(tile), `KV ${percent(tile.kv_usage)}`, `${tile.homes ?? 0} homes`, tile.rung, alarm(tile)];
  say(at("tile-told"), words.filter(Boolean).join(" · "));
}

function open(name) {
  const worker = tiles.get(name)?.tile.worker;
  if (worker !== undefined) show(name, call(`/workers/${encodeURIComponent(worker)}`).then(detail));
}

function detail(worker) {
  const facts = [
    ["state", `${worker.state}: ${worker.reason}`], ["engine", `${worker.engine} ${worker.version ?? ""}`], ["role", worker.role],
    ["models", worker.models.join(", ") || NOTHING], ["cache", `${count(worker.kv_tokens)} tokens in blocks of ${worker.block_size ?? NOTHING}`],
    ["connections", `${worker.connections}, ${worker.idle_connections} idle`],
  ];
  const targets = worker.targets.flatMap((target) => [
    el("h3", {}, target.name),
    list([
      ["in flight", target.running], ["queued there", target.queue ?? NOTHING], ["prefill in front", ms(target.wait_seconds * 1000)],
      ["KV in use", percent(target.kv_usage)], ["sessions at home", target.homes], ["breaker", `${target.breaker}${target.breaker_reason ? `: ${target.breaker_reason}` : ""}`],
      ["holdings", `${target.belief.rung}: ${target.belief.reason}`], ["counted on", percent(target.belief.cache_share)],
      ["evicted", `${count(target.evicted_pages)} pages`], ["returning", target.returns ?? NOTHING],
    ]),
  ]);
  const lacks = worker.lacks.map((lack) => el("li", {}, el("b", {}, lack.what), ` – ${lack.costs}. Cure: ${lack.cure}`));
  return [list(facts), ...targets, lacks.length ? el("h3", {}, "What it lacks") : null, el("ul", { class: "plain" }, lacks)];
}

export function list(rows) {
  return el("dl", { class: "facts" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

