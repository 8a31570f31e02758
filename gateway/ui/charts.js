// Small charts, drawn by hand.

import { el, ms, percent, put, svg } from "/ui/dom.js";

const HIGH = 190, LEFT = 40, RIGHT = 8, TOP = 8, BOTTOM = 22;
const NARROW = 280;
const SPANS = [1, 2, 5, 10];

// Shares over the last minutes, ten at most. series: [{name, kind, read(point)}]; the first is filled.
export function shares(place, points, series) {
  const wide = Math.max(NARROW, place.clientWidth);
  const end = points.length ? points[points.length - 1].time : Date.now() / 1000;
  const minutes = SPANS.find((each) => !points.length || end - points[0].time <= each * 60) ?? SPANS[SPANS.length - 1];
  const x = (time) => wide - RIGHT - ((end - time) / (minutes * 60)) * (wide - LEFT - RIGHT);
  const y = (share) => TOP + (1 - Math.max(0, Math.min(1, share))) * (HIGH - TOP - BOTTOM);
  const shown = points.filter((point) => end - point.time <= minutes * 60);
  const drawn = series.flatMap((each, n) => lines(shown, each, x, y, n === 0));
  const words = series.map((each) => `${each.name} ${percent(shown.length ? each.read(shown[shown.length - 1]) : null)}`);
  put(place, svg("svg", { viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": words.join(", ") }, grid(x, y, end, minutes, wide), drawn),
    el("ul", { class: "legend" }, series.map((each, n) => el("li", {}, el("i", { class: `line ${each.kind}` }), words[n]))));
}

function grid(x, y, end, minutes, wide) {
  const rows = [0, 0.25, 0.5, 0.75, 1].map((share) => svg("g", { class: "grid" },
    svg("line", { x1: LEFT, x2: wide - RIGHT, y1: y(share), y2: y(share) }),
    svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, percent(share))));
  const columns = (wide < 480 ? [1, 0.5, 0] : [1, 0.8, 0.6, 0.4, 0.2, 0]).map((part) => svg("text", {
    x: x(end - part * minutes * 60), y: HIGH - 5, class: "grid", "text-anchor": part === 1 ? "start" : part ? "middle" : "end",
  }, part ? ago(part * minutes) : "now"));
  return [...rows, ...columns];
}

function ago(minutes) {
  return minutes < 1 || minutes % 1 ? `${Math.round(minutes * 60)} s` : `${minutes} min`;
}

// What is not known leaves a gap, as does a time in which nobody looked.
function lines(points, { kind, read }, x, y, filled) {
  const runs = [];
  let last = null;
  for (const point of points) {
    const share = read(point);
    if (share === null || share === undefined) { last = null; continue; }
    if (last === null || point.time - last > 15) runs.push([]);
    runs[runs.length - 1].push([x(point.time), y(share)]);
    last = point.time;
  }
  return runs.flatMap((run) => {
    const path = run.map(([a, b], n) => `${n ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
    const area = `${path}L${run[run.length - 1][0].toFixed(1)} ${y(0)}L${run[0][0].toFixed(1)} ${y(0)}Z`;
    return [filled && svg("path", { class: `area ${kind}`, d: area }), svg("path", { class: `line ${kind}`, d: path })];
  });
}

// Parts of a whole as one bar with its words below: [{name, kind, share, title}].
export function parts(place, told, empty) {
  const known = told.filter((each) => each.share !== null && each.share > 0.0005);
  if (!known.length) { put(place, el("p", { class: "quiet" }, empty)); return; }
  let left = 0;
  const bars = known.map((each) => {
    const bar = svg("rect", { class: each.kind, x: `${left * 100}%`, y: 0, width: `${each.share * 100}%`, height: 14 },
      svg("title", {}, `${each.name}: ${percent(each.share, 1)}`));
    left += each.share;
    return bar;
  });
  const words = known.map((each) => el("li", { title: each.title }, el("i", { class: each.kind }), `${each.name} `,
    el("b", {}, percent(each.share))));
  put(place, svg("svg", { class: "parts", height: 14, width: "100%", role: "img", "aria-hidden": "true" }, bars),
    el("ul", { class: "legend" }, words));
}

// From p50 to p99 on a logarithmic scale that all rows share.
export function range(row, least, most) {
  const x = (value) => `${Math.max(0, Math.min(100, (Math.log(value / least) / Math.log(most / least)) * 100)).toFixed(1)}%`;
  const [low, middle, high] = [row.p50, row.p90, row.p99].map((value) => Math.max(value, least));
  const width = `${Math.max(0.8, parseFloat(x(high)) - parseFloat(x(low)))}%`;
  return svg("svg", { class: "range", height: 16, width: "100%", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: "100%", y1: 8, y2: 8 }),
    svg("rect", { x: x(low), y: 4, width, height: 8, rx: 2 }, svg("title", {}, `p50 ${ms(low)}, p90 ${ms(middle)}, p99 ${ms(high)}`)),
    svg("circle", { cx: x(low), cy: 8, r: 4 }), svg("rect", { class: "tick", x: x(middle), y: 2, width: 2, height: 12 }));
}
