// What is asked for while it is on the screen: sessions, prefixes, findings, tenants.

import { call, whileSeen } from "/ui/admin.js";
import { NOTHING, at, count, el, percent, put, say, span, table } from "/ui/dom.js";
import { list } from "/ui/fleet.js";

const RECENT = 100, SEARCHED = 1000, SHOWN = 100;
let show = () => {};
let live = { tenants: [] };
let examine = () => {};

export function startLists(open) {
  show = open;
  const turn = whileSeen(at("sessions"), 3, sessions);
  let typing = 0;
  at("sessions-search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(turn, 150);
  });
  whileSeen(at("prefixes"), 6, prefixes);
  examine = whileSeen(at("doctor"), 6, doctor);
  whileSeen(at("tenants"), 2, tenants);
}

// What the feed says of tenants and the doctor.
export function listsNow(told) {
  const first = live.doctor === undefined;
  live = told;
  if (first) examine();
}

function failed(place) {
  return (error) => put(place, el("p", { class: error.status === 404 ? "quiet" : "error" }, error.message));
}

// -- sessions ------------------------------------------------------------------------------------------------------------

async function sessions() {
  const wanted = at("sessions-search").value.trim().toLowerCase();
  try {
    if (/^[0-9a-f]{32}$/.test(wanted)) {
      rows([await call(`/sessions/${wanted}`)], 1, null);
      return;
    }
    const told = await call(`/sessions?limit=${wanted ? SEARCHED : RECENT}`);
    const found = told.sessions.filter((row) => !wanted || row.id.startsWith(wanted) || row.tenant.toLowerCase().includes(wanted));
    rows(found.slice(0, SHOWN), told.total, wanted ? found.length : null);
  } catch (error) {
    failed(at("sessions-table"))(error);
  }
}

function rows(found, total, matching) {
  const words = matching === null ? `${count(total)} live` : `${count(matching)} match among the ${count(Math.min(total, SEARCHED))} used last`;
  say(at("sessions-count"), words);
  const focused = document.activeElement?.dataset?.session;
  put(at("sessions-table"), table("Sessions, the last used first", [
    ["Session", "", (row) => el("button", { type: "button", class: "link", "data-session": row.id, onclick: () => openSession(row.id) }, row.id.slice(0, 8))],
    ["Tenant, model", "", (row) => `${row.tenant === "anonymous" ? "" : `${row.tenant} · `}${row.model}`],
    ["Home", "", (row) => row.home ?? NOTHING],
    ["Turns", "number", (row) => row.turns],
    ["Prompt", "number extra", (row) => count(row.prompt_tokens)],
    ["Idle", "number extra", (row) => (row.running ? "runs" : span(row.idle_seconds))],
    ["Known by", "extra", (row) => row.source],
  ], found));
  if (focused) at("sessions-table").querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
}

export function openSession(id) {
  show(`Session ${id.slice(0, 12)}`, call(`/sessions/${encodeURIComponent(id)}`).then(story));
}

function story(told) {
  const family = [told.parent && ["parent", told.parent], told.children_total && ["children", `${told.children_total}: ${told.children.slice(0, 5).join(", ")}`]];
  const facts = [
    ["id", told.id], ["tenant, model", `${told.tenant} · ${told.model}`], ["known by", told.source],
    ["home", told.home ? `${told.home}, because of: ${told.why ?? NOTHING}` : "none"], told.partner && ["prefill at", told.partner],
    ["turns", `${told.turns}, ${told.running} running, idle for ${span(told.idle_seconds)}`], ["last prompt", `${count(told.prompt_tokens)} tokens`],
    ["held by", Object.entries(told.holdings).map(([name, tokens]) => `${name} ${count(tokens)}`).join(", ") || "nobody"],
    ["found, of late", percent(told.hit_rate)], told.tool && ["waits for", told.tool], ...family,
    told.returns?.says && ["its return", told.returns.says],
  ].filter(Boolean);
  return [
    list(facts), el("h3", {}, "Last turns"),
    table("Last turns", [
      ["Prompt", "number", (row) => count(row.prompt_tokens)], ["Found", "number", (row) => count(row.cached_tokens)],
      ["", "number", (row) => percent(row.rate)], ["", "stretch", (row) => bar(row.rate ?? 0)],
    ], told.hits),
    el("h3", {}, "Breaks"),
    told.breaks?.length ? table("Where its prompts broke from those before", [
      ["Cause", "", (row) => row.cause], ["Place", "", (row) => place(row.place)], ["Lost", "number", (row) => `${count(row.tokens_lost)} tokens`],
    ], told.breaks) : el("p", { class: "quiet" }, told.breaks ? "None that was examined." : "Not known: the doctor is off."),
  ];
}

function bar(share) {
  const fill = el("i", { class: "fill" });
  fill.style.setProperty("--share", share);
  return el("span", { class: "meter" }, fill);
}

const place = (told) => Object.values(told ?? {}).filter((value) => value !== null && value !== "").join(" ");

// -- prefixes ------------------------------------------------------------------------------------------------------------

const opened = new Set();
let lastTree = "";

async function prefixes() {
  try {
    const told = await call("/prefixes");
    const shown = JSON.stringify(told.prefixes);
    say(at("prefixes-note"), `${told.complete ? "all of the index" : `${count(told.looked_at)} nodes of it looked at`}, ${span(told.age_seconds)} ago`);
    if (shown === lastTree) return;
    lastTree = shown;
    const most = Math.max(1, ...told.prefixes.map((each) => each.tokens * each.prompts));
    put(at("prefixes-tree"), told.prefixes.length ? el("ul", { class: "tree" }, told.prefixes.map((each) => branch(each, most))) : el("p", { class: "quiet" }, "No two prompts share a prefix yet."));
  } catch (error) {
    lastTree = "";
    failed(at("prefixes-tree"))(error);
  }
}

function branch(each, most) {
  const whose = `${each.tenant ? `${each.tenant} · ` : ""}${each.model}${each.apart ? " · kept apart" : ""}`;
  const fill = el("i", { class: "fill" });
  fill.style.setProperty("--share", Math.min(1, (each.tokens * each.prompts) / most));
  const words = [
    el("span", { class: "head" }, el("code", {}, `#${each.id.slice(0, 4)}`), ` ${whose} `, el("b", {}, `${count(each.tokens)} tokens`)),
    el("span", { class: "meter" }, fill),
    el("span", { class: "quiet" }, `${each.prompts_complete ? "" : "at least "}${count(each.prompts)} prompts go on · ${span(each.used_seconds_ago)} ago · held by ${each.holders_total}: `, el("span", { class: "names" }, holders(each))),
  ];
  if (!each.children.length) return el("li", {}, el("div", { class: "leaf" }, words));
  const node = el("details", { open: opened.has(each.id) }, el("summary", {}, words), el("ul", { class: "tree" }, each.children.map((child) => branch(child, most))));
  node.addEventListener("toggle", () => (node.open ? opened.add(each.id) : opened.delete(each.id)));
  return el("li", {}, node);
}

function holders({ holders: names, holders_total: total }) {
  const shown = names.slice(0, 6).join(", ");
  return total > 6 ? `${shown} and ${total - 6} more` : shown;
}

// -- the doctor ----------------------------------------------------------------------------------------------------------

async function doctor() {
  if (live.doctor === undefined) return;
  if (live.doctor === null) {
    put(at("doctor-list"), el("p", { class: "quiet" }, "The doctor is off here: doctor.enabled."));
    return;
  }
  try {
    const told = await call("/doctor");
    const rows = told.findings.slice(0, 12).map((each) => el("li", {}, el("p", {}, each.text),
      el("p", { class: "quiet" }, `${count(each.breaks)} breaks, ${count(each.tokens_lost)} tokens${each.canonical_gain_tokens ? `; tenants[].canonical would give back ${count(each.canonical_gain_tokens)}` : ""}`)));
    const examined = el("p", { class: "quiet" }, `${count(told.examined)} prompts examined, ${count(told.skipped)} skipped.`);
    put(at("doctor-list"), rows.length ? el("ol", { class: "findings" }, rows) : el("p", {}, "Nothing breaks prompts off from what is cached."), examined);
  } catch (error) {
    failed(at("doctor-list"))(error);
  }
}

// -- tenants -------------------------------------------------------------------------------------------------------------

async function tenants() {
  try {
    const told = await call("/tenants");
    const now = new Map(live.tenants.map((row) => [row.name, row]));
    put(at("tenants-table"), table("Tenants", [
      ["Tenant", "", (row) => row.name],
      ["Requests", "number", (row) => count(now.get(row.name)?.requests)],
      ["Failed", "number extra", (row) => count(now.get(row.name)?.failed)],
      ["Refused", "number", (row) => count(now.get(row.name)?.refused)],
      ["In flight", "number", (row) => row.running],
      ["Waiting", "number", (row) => row.queued],
      ["Priority", "extra", (row) => row.priority],
      ["Policy", "extra", (row) => row.policy ?? "the default"],
      ["Cache", "extra", (row) => row.isolation],
      ["Limits", "limits", (row) => limits(row.limits)],
    ], told.tenants));
  } catch (error) {
    failed(at("tenants-table"))(error);
  }
}

const UNITS = { requests_per_minute: "requests/min", prompt_tokens_per_minute: "prompt tokens/min", computed_tokens_per_minute: "computed tokens/min", concurrency: "at once" };

function limits(told) {
  return Object.entries(told).map(([name, { granted, used }]) => el("span", { class: "limit", title: `${used} of ${granted}` },
    bar(Math.min(1, used / granted)), `${count(used)} of ${count(granted)} ${UNITS[name] ?? name}`));
}
