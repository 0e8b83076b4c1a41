"use strict";
const at = id => document.getElementById(id);
let chat = newChat();  // {id, messages}; a message has role, content and perhaps images; an answer perhaps reasoning and calls of tools
let images = [];  // of the next message, as data URLs
let stopper = null;
let editing = null;  // the place of the question that is being changed
let model = null;
let draft = "";

function headers() {
  const key = at("key").value.trim();
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

// Text is only ever set as text, so nothing in it can become part of the page.
function make(tag, kind, text, parent) {
  const box = document.createElement(tag);
  if (kind) box.className = kind;
  box.textContent = text;
  parent.append(box);
  return box;
}

const add = (kind, text, parent = at("talk")) => make("div", kind, text, parent);

function button(text, parent, onClick) {
  const made = make("button", "", text, parent);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function addParts(parts, parent) {
  for (const part of parts) {
    if (part.tag === "text") parent.append(part.text); else make(part.tag, "", part.text, parent);
  }
}

function addBlocks(text, parent) {
  for (const block of markdown(text)) {
    if (block.tag === "pre") {
      make("code", "", block.text, make("pre", "", "", parent)).dataset.language = block.language;
    } else if (block.items) {
      const list = make(block.tag, "", "", parent);
      if (block.tag === "ol") list.start = block.start;
      for (const item of block.items) addParts(item, make("li", "", "", list));
    } else addParts(block.parts, make(block.tag, "", "", parent));
  }
}

function fold(title, text, kind, parent, open) {
  const folded = make("details", kind, "", parent);
  folded.open = open;
  make("summary", "", title, folded);
  make("pre", "", text, folded);
}

// The answer in `box`: reasoning and calls of tools folded, text as Markdown. What a person has unfolded stays so.
function showAnswer(box, message) {
  const open = [...box.querySelectorAll("details")].map(folded => folded.open);
  box.replaceChildren();
  if (message.reasoning) fold("Reasoning", message.reasoning.trim(), "reasoning", box, open.shift() ?? false);
  addBlocks(message.content.trimEnd(), box);
  for (const call of message.calls ?? []) fold(`Call of ${call.name}`, call.arguments, "call", box, open.shift() ?? false);
}

// Only images that are part of the page's own data: nothing is fetched.
function addImage(url, parent) {
  const image = make("img", "", "", parent);
  image.src = url;
  image.alt = "image";
}

function showImages() {
  at("images").replaceChildren();
  images.forEach((url, place) => {
    const box = button("", at("images"), () => { images.splice(place, 1); showImages(); });
    box.title = "Remove this image";
    addImage(url, box);
  });
}

async function attach(files) {
  const read = [...files].filter(file => file.type.startsWith("image/")).map(file => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  }));
  try { images.push(...await Promise.all(read)); } catch (error) { add("error", error.message); }
  showImages();
  at("text").focus();
}

// Puts a question back to be changed or sent again.
function giveBack(message) {
  at("text").value = message.content;
  images = [...message.images ?? []];
  showImages();
}

async function copy(text, box) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else getSelection().selectAllChildren(box);  // without HTTPS there is no clipboard: it is selected, to be copied by hand
}

function showMessage(place) {
  const message = chat.messages[place], isUser = message.role === "user";
  const box = add(`said ${message.role}`, isUser ? message.content : "");
  for (const url of message.images ?? []) addImage(url, box);
  const acts = add(isUser ? "acts mine" : "acts", "");
  if (isUser) button("Edit", acts, () => { editing = place; giveBack(message); at("text").focus(); });
  else {
    showAnswer(box, message);
    button("Copy", acts, () => copy(message.content, box));
    button("Regenerate", acts, () => regenerate(place));
  }
  return box;
}

function show() {
  at("talk").replaceChildren();
  chat.messages.forEach((_, place) => showMessage(place));
  toEnd();
}

// Chats are kept in this browser, each under a key of its own; where there is no storage, they end with the page.
const KEPT = "moegraft chat ";

function newChat() {
  return {id: `${Date.now()} ${Math.random()}`, messages: []};
}

function keptChats() {
  try {
    return Object.keys(localStorage).filter(key => key.startsWith(KEPT)).map(key => JSON.parse(localStorage.getItem(key)))
      .sort((a, b) => b.id.localeCompare(a.id));
  } catch { return []; }
}

function keep() {
  try { localStorage.setItem(KEPT + chat.id, JSON.stringify(chat)); } catch { /* no storage, or it is full */ }
  showChats();
}

function showChats() {
  const chats = keptChats(), list = at("chats");
  list.replaceChildren();
  if (!chats.some(one => one.id === chat.id)) chats.unshift(chat);
  for (const one of chats) make("option", "", one.messages[0]?.content.slice(0, 40) || "New chat", list).value = one.id;
  list.value = chat.id;
  list.hidden = chats.length < 2;
  at("drop").hidden = !chat.messages.length;
}

function open(other) {
  stopper?.abort();
  stopper = editing = null;
  chat = other;
  images = [];
  showImages();
  answering(false);
  show();
  showChats();
  at("text").focus();
}

function drop() {
  try { localStorage.removeItem(KEPT + chat.id); } catch { /* no storage */ }
  open(newChat());
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
  at("attach").hidden = !now.reads_images;
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

// Asks for an answer to the chat, whose last message is a question.
async function ask() {
  const mine = stopper = new AbortController(), here = chat, question = here.messages.at(-1);
  const body = {messages: here.messages.map(asSent), stream: true, stream_options: {include_usage: true}};
  const box = add("said assistant", ""), about = add("about", ""), answer = {role: "assistant", content: "", reasoning: "", calls: []};
  toEnd();
  const asked = performance.now();
  let first = null, pieces = 0, last = null, drawn = true, failure = "";
  const draw = () => {
    if (drawn) return;
    drawn = true;
    const follow = atEnd();
    showAnswer(box, answer);
    if (follow) toEnd();
  };
  answering(true);
  const clock = setInterval(() => { about.textContent = liveLine(pieces, asked, first, performance.now()); }, 200);
  const painter = setInterval(draw, 50);  // not for every piece: all of the answer is drawn again
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify({...body, ...(model ? {model} : {})}), signal: mine.signal,
    });
    if (!reply.ok) throw await refusal(reply);
    await stream(reply, data => {
      if (data.error) throw new Error(data.error.message);
      if (data.usage) last = data;
      const delta = data.choices[0]?.delta ?? {};
      const calls = (delta.tool_calls ?? []).map(call => call.function);
      if (!delta.content && !delta.reasoning_content && !calls.length) return;
      first ??= performance.now();
      pieces += 1;
      answer.content += delta.content ?? "";
      answer.reasoning += delta.reasoning_content ?? "";
      answer.calls.push(...calls);
      drawn = false;
    });
    if (!last) throw new Error("the answer broke off");
  } catch (error) {
    failure = mine.signal.aborted ? "stopped" : error.message;
  }
  clearInterval(clock);
  clearInterval(painter);
  const finished = performance.now();
  if (stopper === mine) { stopper = null; answering(false); }
  if (chat !== here) return;  // another chat was opened
  about.remove();
  box.remove();
  if (!pieces && !last) {  // the question was not answered: it is given back to be sent again
    here.messages.pop();
    show();
    if (!at("text").value) giveBack(question);
  } else {
    here.messages.push(answer);
    keep();
    showMessage(here.messages.length - 1);
    add("about", last ? speedLine(last.usage, last.moegraft) : liveLine(pieces, asked, first, finished));
    const work = last ? workLine(last.moegraft) : "";
    if (work) add("about", work);
  }
  if (failure) add("error", failure);
  toEnd();
  status();
}

function send() {
  const text = at("text").value;
  if (stopper || !(text.trim() || images.length)) return;
  draft = text;
  at("text").value = "";
  if (editing !== null) { chat.messages = chat.messages.slice(0, editing); editing = null; show(); }
  chat.messages.push({role: "user", content: text, ...(images.length ? {images} : {})});
  images = [];
  showImages();
  showMessage(chat.messages.length - 1);
  ask();
}

function regenerate(place) {
  if (stopper) return;
  chat.messages = chat.messages.slice(0, place);
  show();
  ask();
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
at("attach").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => { await attach(at("files").files); at("files").value = ""; });
at("text").addEventListener("paste", event => {
  if (at("attach").hidden || !event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
document.addEventListener("dragover", event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
document.addEventListener("drop", event => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();  // the browser would leave the page for the file
  if (!at("attach").hidden) attach(event.dataTransfer.files);
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { stopper?.abort(); editing = null; }
});
at("new-chat").addEventListener("click", () => open(newChat()));
at("chats").addEventListener("change", () => open(keptChats().find(one => one.id === at("chats").value) ?? newChat()));
at("drop").addEventListener("click", drop);
at("key").addEventListener("change", status);
at("where").open = innerWidth >= 700 && innerHeight >= 600;  // what runs where, unless the screen is small
chat = keptChats()[0] ?? chat;
show();
showChats();
status();
setInterval(status, 5000);
