"use strict";
const at = id => document.getElementById(id);
let messages = [];
let stopper = null;
let model = null;
let draft = "";

function headers() {
  const key = at("key").value.trim();
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

// Text is only ever set as text, so nothing in it can become part of the page.
function add(kind, text, parent = at("talk")) {
  const box = document.createElement("div");
  box.className = kind;
  box.textContent = text;
  parent.append(box);
  return box;
}

function atEnd() {
  const talk = at("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
}

function toEnd() {
  at("talk").scrollTop = at("talk").scrollHeight;
}

async function refusal(reply) {
  const body = await reply.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${reply.status}`);
}

async function status() {
  const reply = await fetch("v1/status", {headers: headers()}).catch(() => null);
  if (!reply) { at("status").textContent = "the server is gone"; return; }
  const locked = reply.status === 401;
  at("key-row").hidden = !locked && !at("key").value;
  if (!reply.ok) { at("status").textContent = locked ? "this server wants its key" : `the server answered ${reply.status}`; return; }
  const now = await reply.json();
  model = now.model;
  at("model").textContent = now.model;
  at("status").textContent = statusLine(now);
  at("placement").replaceChildren();
  for (const line of now.placement) add("line", line, at("placement"));
  if (now.one_at_a_time_because) add("line", `one request at a time: ${now.one_at_a_time_because}`, at("placement"));
}

function answering(yes) {
  at("send").textContent = yes ? "Stop" : "Send";
  at("send").classList.toggle("stop", yes);
  at("talk").setAttribute("aria-busy", String(yes));
}

async function stream(reply, onEvent) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {done, value} = await reader.read();
    if (done) return;
    const {events, rest} = splitEvents(held + value);
    held = rest;
    events.forEach(onEvent);
  }
}

async function ask(text) {
  const said = messages = [...messages, {role: "user", content: text}];
  const question = add("said user", text), box = add("said assistant", ""), about = add("about", "");
  toEnd();
  const asked = performance.now();
  let answer = "", first = null, pieces = 0, last = null;
  const mine = stopper = new AbortController();
  answering(true);
  const clock = setInterval(() => { about.textContent = liveLine(pieces, asked, first, performance.now()); }, 200);
  try {
    const body = {messages: said, stream: true, stream_options: {include_usage: true}, ...(model ? {model} : {})};
    const reply = await fetch("v1/chat/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal});
    if (!reply.ok) throw await refusal(reply);
    await stream(reply, data => {
      if (data.error) throw new Error(data.error.message);
      if (data.usage) last = data;
      const piece = data.choices[0]?.delta.content;
      if (!piece) return;
      const follow = atEnd();
      first ??= performance.now();
      pieces += 1;
      answer += piece;
      box.textContent = answer;
      if (follow) toEnd();
    });
    if (!last) throw new Error("the answer broke off");
  } catch (error) {
    if (messages === said) add("error", mine.signal.aborted ? "stopped" : error.message);
  }
  clearInterval(clock);
  const finished = performance.now();
  if (stopper === mine) { stopper = null; answering(false); }
  if (messages !== said) { about.remove(); return; }  // a new conversation was begun
  if (!answer && !last) {  // the question was not answered: it is given back to be sent again
    messages = said.slice(0, -1);
    box.remove(); about.remove();
    if (!at("text").value) { at("text").value = text; question.remove(); }
  } else {
    messages = [...said, {role: "assistant", content: answer}];
    box.textContent = answer.trimEnd();
    about.textContent = last ? speedLine(last.usage, last.moegraft) : liveLine(pieces, asked, first, finished);
    const work = last ? workLine(last.moegraft) : "";
    if (work) about.after(Object.assign(document.createElement("div"), {className: "about", textContent: work}));
  }
  toEnd();
  status();
}

function send() {
  const text = at("text").value;
  if (stopper || !text.trim()) return;
  draft = text;
  at("text").value = "";
  ask(text);
}

function anew() {
  stopper?.abort();
  stopper = null;
  messages = [];
  answering(false);
  at("talk").replaceChildren();
  at("text").focus();
}

at("form").addEventListener("submit", event => {
  event.preventDefault();
  if (stopper) stopper.abort(); else send();
});
at("text").addEventListener("keydown", event => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
  if (event.key === "ArrowUp" && !at("text").value && draft) { event.preventDefault(); at("text").value = draft; }
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") stopper?.abort();
});
at("anew").addEventListener("click", anew);
at("key").addEventListener("change", status);
at("where").open = innerWidth >= 700 && innerHeight >= 600;  // what runs where, unless the screen is small
status();
setInterval(status, 5000);
