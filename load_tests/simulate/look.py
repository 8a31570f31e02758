"""Style and script of the page."""

LIGHT = ("#0b62c4", "#c2410c", "#047857", "#8b2fd6", "#b91c5c", "#57606a", "#0e7490", "#854d0e")
DARK = ("#6cb2ff", "#ff9f5a", "#4ade9a", "#c99bff", "#ff7eb0", "#b6bec8", "#4fd6ea", "#e3b341")

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#56606b;--rule:#d8dee4;--panel:#f6f8fa;--heat:#0b3d91}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e8ecf1;--dim:#a3adb8;--rule:#333a43;--panel:#1c2128;--heat:#8ec5ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:1.2em 0 .4em}h3{font-size:.95rem;margin:0 0 4px}
p{margin:.3em 0;color:var(--dim)}
nav{position:sticky;top:0;z-index:1;display:flex;flex-wrap:wrap;gap:6px;padding:8px 0;background:var(--bg)}
button{display:flex;align-items:center;gap:6px;font:inherit;font-size:.9rem;color:inherit;background:var(--panel);
border:1px solid var(--rule);border-radius:6px;padding:4px 8px;cursor:pointer}
button[aria-pressed=false]{text-decoration:line-through;color:var(--dim);background:none}
button:focus-visible,.wide:focus-visible{outline:2px solid var(--heat);outline-offset:1px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:14px}
figure{margin:0;padding:10px;border:1px solid var(--rule);border-radius:8px;min-width:0;max-width:600px}
figcaption{font-size:.85rem;color:var(--dim)}
.plot{display:block;width:100%;height:auto;touch-action:pan-y}
.plot text{font-size:12px;fill:var(--dim);text-anchor:middle}.plot text.left{text-anchor:end}
[data-plot^=map] .grid{display:none}
.grid{stroke:var(--rule);stroke-width:1;fill:none}.hair{stroke:var(--fg);stroke-width:1;opacity:.5}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:butt}
.mark{fill:var(--c);stroke:var(--bg);stroke-width:1}
.bound{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:3 4;fill:none}
.heat{fill:var(--heat)}
.swatch{width:40px;height:12px;flex:none;vertical-align:middle;margin-right:6px}button .swatch{margin:0}
.scale{display:inline-block}.scale i{display:inline-block;width:14px;height:12px;vertical-align:-1px;background:var(--heat)}
.scale i:first-of-type{opacity:1;background:var(--bg);border:1px solid var(--rule)}
.wide{overflow-x:auto;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.85rem}
th,td{padding:6px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{color:var(--dim);font-weight:600;white-space:pre-line;vertical-align:bottom;line-height:1.2}
tbody tr:last-child>*{border-bottom:0}
th:first-child{text-align:left;position:sticky;left:0;background:var(--bg);font-weight:600}
#tip{position:fixed;z-index:2;pointer-events:none;max-width:min(92vw,360px);padding:6px 9px;font-size:.85rem;
background:var(--fg);color:var(--bg);border-radius:6px}
@media (max-width:520px){body{padding:10px}th:first-child .swatch{display:none}th,td{padding:5px 6px}}
@media print{nav,#tip{display:none}}
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const tip = document.getElementById('tip'), hidden = new Set();
  const [left, top, right, bottom] = data.box;
  for (const button of document.querySelectorAll('nav button')) {
    button.addEventListener('click', () => {
      const place = +button.dataset.p;
      hidden.has(place) ? hidden.delete(place) : hidden.add(place);
      button.setAttribute('aria-pressed', String(!hidden.has(place)));
      document.body.classList.toggle('hide' + place, hidden.has(place));
    });
  }
  const span = seconds => seconds < 120 ? seconds.toFixed(1) + ' s'
    : seconds < 7200 ? (seconds / 60).toFixed(1) + ' min' : (seconds / 3600).toFixed(2) + ' h';
  const lines = (series, x) => series.flatMap((points, place) => {
    if (hidden.has(place) || !points.length) return [];
    let best = points[0];
    for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
    return [data.policies[place] + ': ' + best[2]];
  });
  const cell = (plot, x, y) => {
    const window = Math.min(data.windows - 1, Math.floor((x - left) / (right - left) * data.windows));
    const row = Math.min(plot.cells.length - 1, Math.floor((y - top) / (bottom - top) * plot.cells.length));
    const step = data.seconds / data.windows;
    return ['engine ' + plot.names[row] + ': ' + plot.cells[row][window].toLocaleString('en') + ' tokens',
      span(window * step) + ' to ' + span((window + 1) * step)];
  };
  for (const svg of document.querySelectorAll('svg.plot')) {
    const plot = data.plots[svg.dataset.plot], hair = svg.querySelector('.hair');
    const leave = () => { tip.hidden = true; hair.setAttribute('d', ''); };
    svg.addEventListener('pointerleave', leave);
    svg.addEventListener('pointermove', event => {
      const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
      const x = (event.clientX - box.left) / box.width * view.width;
      const y = (event.clientY - box.top) / box.height * view.height;
      if (x < left || x > right || y < top || y > bottom) return leave();
      const said = plot.series ? lines(plot.series, x) : cell(plot, x, y);
      if (!said.length) return leave();
      hair.setAttribute('d', plot.series ? 'M' + x + ' ' + top + 'V' + bottom : '');
      tip.replaceChildren(...said.map(text => Object.assign(document.createElement('div'), {textContent: text})));
      tip.hidden = false;
      const size = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 4)) + 'px';
      tip.style.top = Math.max(4, event.clientY - size.height - 12) + 'px';
    });
  }
})();
"""


def style(policies: int, levels: int = 8) -> str:
    """For so many policies, and shades of the maps."""
    rules = [STYLE]
    for colours, form in ((LIGHT, "{}"), (DARK, "@media (prefers-color-scheme:dark){{{}}}")):
        own = "".join(f".p{place}{{--c:{colours[place % len(colours)]}}}" for place in range(policies))
        rules.append(form.format(own))
    rules += [f".hide{place} .series.p{place}{{display:none}}" for place in range(policies)]
    rules += [f".h{at}{{opacity:{0.12 + 0.88 * (at - 1) / (levels - 1):.2f}}}" for at in range(1, levels + 1)]
    return "\n".join(rules)
