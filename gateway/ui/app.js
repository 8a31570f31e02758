// The page: joins the feed to its panels, and keeps what belongs to none of them (theme, token, keys, the dialog).

import { asks, follow, forget, token } from "/ui/admin.js";
import { at, el, mark, put, say } from "/ui/dom.js";
import { drawFleet, startFleet } from "/ui/fleet.js";
import { openSession, listsNow, startLists } from "/ui/lists.js";
import { drawOverview, startOverview } from "/ui/overview.js";
import { exampleFor, startRoute } from "/ui/route.js";

const THEME = "warmroute-theme";
const THEMES = ["auto", "dark", "light"];

function theme(wanted) {
  const root = document.documentElement;
  mark(root, "data-theme", wanted === "auto" ? null : wanted);
  say(at("theme"), `Theme: ${wanted}`);
}

function startTheme() {
  let now = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto";
  theme(now);
  at("theme").addEventListener("click", () => {
    now = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    localStorage.setItem(THEME, now);
    theme(now);
  });
}

let shown = 0;

// Show something in front of the page at once, and what is to be told of it when that has come.
async function open(title, coming) {
  const mine = ++shown;
  say(at("detail-title"), title);
  put(at("detail-told"), "…");
  if (!at("detail").open) at("detail").showModal();
  const nodes = await coming.catch((error) => [el("p", { class: "error" }, error.message)]);
  if (mine === shown && at("detail").open) put(at("detail-told"), nodes);
}

// A dialog that gives a token; there is no way round it.
function askToken(why) {
  say(at("ask-why"), `${why}It is kept in this tab only, until the tab is closed.`);
  const dialog = at("ask");
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  if (!dialog.open) dialog.showModal();
  at("ask-token").focus();
  return new Promise((done) => {
    at("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const given = at("ask-token").value.trim();
      at("ask-token").value = "";
      dialog.close();
      done(given);
    }, { once: true });
  });
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    const writes = event.target.closest("input, textarea, select");
    if (event.key !== "/" || writes || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    at("sessions-search").focus();
  });
  at("detail-close").addEventListener("click", () => at("detail").close());
  at("forget").addEventListener("click", () => { forget(); location.reload(); });
}

function draw(told) {
  drawFleet(told);
  drawOverview(told);
  listsNow(told);
  if (told.fleet.whole) exampleFor(told.fleet.tiles.flatMap((tile) => tile.models));
  at("forget").hidden = token() === null;
}

function feed(state, words) {
  mark(at("feed"), "data-state", state);
  say(at("feed"), words);
}

startTheme();
startKeys();
asks(askToken);
startFleet(open);
startOverview(openSession);
startLists(open);
startRoute();
follow(draw, feed);
