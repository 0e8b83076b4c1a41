"use strict";
// What the page makes of what it receives: text in, text out. No document, no network.

// The events of a stream so far, and what is left over of one that has not ended.
function splitEvents(text) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  const data = parts.map(part => part.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n"));
  return {events: data.filter(one => one && one !== "[DONE]").map(one => JSON.parse(one)), rest};
}

function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(1)} %` : "";
}

function time(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// While an answer comes, as this side sees it.
function liveLine(pieces, askedMs, firstMs, nowMs) {
  if (firstMs === null) return `waiting, ${time(nowMs - askedMs)}`;
  const rate = pieces > 1 && nowMs > firstMs ? `, ${(1000 * (pieces - 1) / (nowMs - firstMs)).toFixed(1)} tokens/s` : "";
  return `first token after ${time(firstMs - askedMs)}${rate}`;
}

// What an answer took, as the server counted it.
function speedLine(usage, made) {
  const known = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
  const read = `${count(usage.prompt_tokens, "token")} read` + (known ? ` (${known} known)` : "");
  const parts = [read, `${count(usage.completion_tokens, "token")} made`];
  if (made.tokens_per_second !== null) parts.push(`${made.tokens_per_second.toFixed(1)} tokens/s`);
  if (made.first_token_ms !== null) parts.push(`first after ${time(made.first_token_ms)}`);
  return parts.join(", ");
}

// What ran where for it; "" where nothing is counted.
function workLine(made) {
  const work = made.work, parts = [];
  if (work.experts_used) {
    const onCpu = work.experts_computed_on_cpu || 0;
    parts.push(`experts: ${percent(work.experts_used - onCpu, work.experts_used)} on the GPU, ${percent(onCpu, work.experts_used)} on the CPU`);
    parts.push(`cache hits: ${percent(work.experts_found_on_gpu || 0, work.experts_used)}`);
    if (work.experts_brought_on_demand) parts.push(`brought on demand: ${work.experts_brought_on_demand.toLocaleString("en")}`);
  }
  if (work.tokens_drafted) {
    const rounds = work.draft_rounds ? ` in ${count(work.draft_rounds, "round")}` : "";
    parts.push(`drafts accepted: ${work.tokens_accepted || 0} of ${work.tokens_drafted}${rounds}`);
  }
  if (work.neurons) parts.push(`neurons left out: ${percent(work.neurons_left_out || 0, work.neurons)}`);
  if (!parts.length) return "";
  return parts.join(" · ") + (made.together ? " (with the answers beside it)" : "");
}

// A message as the server takes it.
function asSent({role, content, images}) {
  if (!images?.length) return {role, content};
  const parts = images.map(url => ({type: "image_url", image_url: {url}}));
  return {role, content: content.trim() ? [...parts, {type: "text", text: content}] : parts};
}

// What the server is doing.
function statusLine(now) {
  const parts = [`${now.tokens_per_second.toFixed(1)} tokens/s in all`, `${now.running} running`];
  if (now.waiting) parts.push(`${now.waiting} waiting`);
  if (now.one_at_a_time_because) parts.push("one request at a time");
  return parts.join(" · ");
}

// A line of Markdown as parts: text, code, strong and em. Links stay text.
function inline(line) {
  const parts = [];
  let from = 0;
  for (const found of line.matchAll(/`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*/g)) {
    if (found.index > from) parts.push({tag: "text", text: line.slice(from, found.index)});
    const tag = found[1] !== undefined ? "code" : found[2] !== undefined ? "strong" : "em";
    parts.push({tag, text: found[1] ?? found[2] ?? found[3]});
    from = found.index + found[0].length;
  }
  if (from < line.length) parts.push({tag: "text", text: line.slice(from)});
  return parts;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/, HEADING = /^(#{1,6})\s+(.*)/, ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)/, QUOTE = /^>\s?(.*)/;

// Markdown as a list of blocks: pre, h1 to h6, ul, ol, blockquote and p. A fence that has not ended yet goes to the end.
function markdown(text) {
  const lines = text.split("\n"), blocks = [];
  const isPlain = line => line.trim() && ![FENCE, HEADING, ITEM, QUOTE].some(kind => kind.test(line));
  for (let at = 0; at < lines.length;) {
    const fence = lines[at].match(FENCE), heading = lines[at].match(HEADING), item = lines[at].match(ITEM);
    if (fence) {
      const code = [], ends = line => line.startsWith(fence[1]) && !line.replaceAll(fence[1][0], "");
      for (at++; at < lines.length && !ends(lines[at].trim()); at++) code.push(lines[at]);
      at++;
      blocks.push({tag: "pre", language: fence[2], text: code.join("\n")});
    } else if (heading) {
      blocks.push({tag: `h${heading[1].length}`, parts: inline(heading[2])});
      at++;
    } else if (item) {
      const items = [], ordered = item[1] !== undefined;
      for (let one; at < lines.length && (one = lines[at].match(ITEM)) && (one[1] !== undefined) === ordered; at++) items.push(inline(one[2]));
      blocks.push({tag: ordered ? "ol" : "ul", start: ordered ? Number(item[1]) : 1, items});
    } else if (QUOTE.test(lines[at])) {
      const quoted = [];
      for (let one; at < lines.length && (one = lines[at].match(QUOTE)); at++) quoted.push(one[1]);
      blocks.push({tag: "blockquote", parts: inline(quoted.join("\n"))});
    } else if (isPlain(lines[at])) {
      const plain = [];
      for (; at < lines.length && isPlain(lines[at]); at++) plain.push(lines[at]);
      blocks.push({tag: "p", parts: inline(plain.join("\n"))});
    } else at++;
  }
  return blocks;
}

if (typeof module !== "undefined") module.exports = {asSent, inline, markdown, splitEvents, liveLine, speedLine, workLine, statusLine};
