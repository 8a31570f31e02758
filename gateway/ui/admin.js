// Speaking to the control plane: the token, JSON calls, the live feed.

const KEY = "warmroute-token";
const SILENT = 10000;
const PAUSES = [1000, 2000, 5000];

let asking = null;
let ask = async () => "";

// How a token is asked for: a function of why, that gives one.
export function asks(how) {
  ask = how;
}

export const token = () => sessionStorage.getItem(KEY);

export function forget() {
  sessionStorage.removeItem(KEY);
}

// One question at a time, however many calls are refused.
async function renewed(refused) {
  if (token() !== refused) return;
  asking ??= ask(refused ? "That token was refused. " : "").finally(() => { asking = null; });
  sessionStorage.setItem(KEY, await asking);
}

function headers(more) {
  const held = token();
  return held ? { authorization: `Bearer ${held}`, ...more } : { ...more };
}

// The answer of a call; asks for a token as often as one is needed.
async function send(path, { method = "GET", body, more = {}, signal } = {}) {
  for (;;) {
    const held = token();
    const answer = await fetch(path, { method, body, headers: headers(more), signal, cache: "no-store" });
    if (answer.status !== 401) return answer;
    await renewed(held);
  }
}

// JSON of a call. Throws an Error with the gateway's own words.
export async function call(path, options) {
  const answer = await send(path, options);
  const told = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(told.error?.message ?? `status ${answer.status}`), { status: answer.status });
  return told;
}

export function post(path, body, more = {}) {
  return call(path, { method: "POST", body, more: { "content-type": "application/json", ...more } });
}

// Follow /live for as long as the page is seen. `event` gets each object, `state` a word and what it means.
export function follow(event, state) {
  let failed = 0;
  let stop = null;

  async function once() {
    stop = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENT);
    };
    try {
      const answer = await send("/live", { signal: stop.signal });
      if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `status ${answer.status}`);
      alive();
      await read(answer.body, (told) => { failed = 0; alive(); state("live", "live"); event(told); });
      throw new Error("the gateway ended it");
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
  }

  async function forever() {
    for (;;) {
      if (document.hidden) await seen();
      try {
        await once();
      } catch (error) {
        if (document.hidden) continue;
        state("lost", `no news: ${error.name === "AbortError" ? "the gateway is silent" : error.message}`);
        await new Promise((done) => setTimeout(done, PAUSES[Math.min(failed, PAUSES.length - 1)]));
        failed += 1;
      }
    }
  }

  // A tab that nobody looks at costs the gateway nothing after a while.
  let hiding = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(() => stop?.abort(), 30000);
  });
  forever();
}

function seen() {
  return new Promise((done) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

async function read(body, event) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) event(JSON.parse(part.slice(6)));
    }
  }
}

// Call `look` now and every so many seconds, while `node` is on the screen.
export function whileSeen(node, seconds, look) {
  let visible = false;
  let busy = false;
  const turn = async () => {
    if (!visible || busy || document.hidden) return;
    busy = true;
    try {
      await look();
    } finally {
      busy = false;
    }
  };
  new IntersectionObserver((entries) => {
    visible = entries[entries.length - 1].isIntersecting;
    turn();
  }).observe(node);
  setInterval(turn, seconds * 1000);
  return turn;
}
