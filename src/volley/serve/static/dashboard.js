// The page reads what Prometheus reads, once a second, and draws differences. It asks for nothing outside its server.

const PERIOD = 1000;
const SPAN = 120; // samples that the charts show
const RECENT = 5; // samples that the tiles look back
const $ = (id) => document.getElementById(id);

// -- metrics ----------------------------------------------------------------------------------------------------------

function parse(text) { // the models of a server are added up
  const values = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("volley:")) {
      const end = line.lastIndexOf(" ");
      const name = line.slice(7, end).replace(/(,?)model_name="[^"]*"(,?)/, (_, before, after) => before && after).replace("{}", "");
      values.set(name, (values.get(name) ?? 0) + Number(line.slice(end + 1)));
    }
  }
  return values;
}

const history = []; // {time, values}, oldest first

const total = (sample, name) => sample.values.get(name) ?? 0;
const change = (from, to, name) => total(to, name) - total(from, name);

function byLabel(from, to, name, label) {
  const found = new Map();
  const prefix = `${name}{${label}="`;
  for (const [key, value] of to.values) {
    if (key.startsWith(prefix)) found.set(Number(key.slice(prefix.length, -2)), value - (from ? total(from, key) : 0));
  }
  return new Map([...found].sort((a, b) => a[0] - b[0]));
}

function labelled(sample, name) { // a counter, whatever its label
  let sum = 0;
  for (const [key, value] of sample.values) if (key.startsWith(`${name}{`)) sum += value;
  return sum;
}

const labelledChange = (from, to, name) => labelled(to, name) - labelled(from, name);

const ratio = (from, to, above, below) => {
  const divisor = change(from, to, below);
  return divisor > 0 ? change(from, to, above) / divisor : null;
};

function tau(from, to) { // of a server that only denoises, tokens per pass of the requests that ended
  if (total(to, "decoding_cycles_total") > 0) return ratio(from, to, "decoding_cycle_tokens_total", "decoding_cycles_total");
  const passes = labelledChange(from, to, "denoising_steps_total") + labelledChange(from, to, "commit_passes_total");
  return passes > 0 ? labelledChange(from, to, "denoised_tokens_total") / passes : null;
}

const ZERO = { time: 0, values: new Map() };

// -- tiles ------------------------------------------------------------------------------------------------------------

const count = (number) => (number >= 1e6 ? `${(number / 1e6).toFixed(1)} M` : Math.round(number).toLocaleString("en"));
const percent = (share) => `${Math.round(100 * share)} %`;
const show = (id, text) => { $(id).textContent = text; };

function showTiles() {
  const now = history.at(-1);
  const before = history.at(-1 - RECENT) ?? history[0];
  const seconds = (now.time - before.time) / 1000;
  show("running", count(total(now, "num_requests_running")));
  show("waiting", `${count(total(now, "num_requests_waiting"))} waiting`);
  show("speed", seconds > 0 ? count(change(before, now, "generation_tokens_total") / seconds) : "–");
  show("tokens", `${count(total(now, "generation_tokens_total"))} so far`);
  const always = tau(ZERO, now);
  show("tau", (tau(before, now) ?? always)?.toFixed(2) ?? "–");
  show("tau-total", always ? `${always.toFixed(2)} since the start` : "no decoding yet");
  const names = ["spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"];
  const share = ratio(before, now, ...names) ?? ratio(ZERO, now, ...names);
  show("accepted", share === null ? "–" : percent(share));
  show("drafted", `${count(total(now, names[1]))} drafted`);
  show("pages", percent(total(now, "kv_pages_used") / (total(now, "kv_pages") || 1)));
  const preempted = total(now, "num_preemptions_total");
  show("preempted", `${count(total(now, "kv_pages_used"))} of ${count(total(now, "kv_pages"))}${preempted ? ` · ${count(preempted)} preempted` : ""}`);
}

function showRecalibration() {
  const now = history.at(-1);
  const isOn = now.values.has("recalibration_rows");
  $("recalibration").hidden = !isOn;
  if (!isOn) return;
  const signed = (share) => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)} %`;
  show("drift", signed(-total(now, "recalibration_drift")));
  show("training", total(now, "recalibration_training") ? "training may run" : "training waits for traffic");
  show("gain", signed(total(now, "recalibration_gain")));
  show("swaps", count(total(now, "recalibration_swaps_total")));
  const failed = total(now, "recalibration_failures_total");
  show("candidates", `${count(total(now, "recalibration_candidates_total"))} judged${failed ? ` · ${count(failed)} failed` : ""}`);
  show("kept", count(total(now, "recalibration_rows")));
  show("kept-tokens", `${count(total(now, "recalibration_tokens"))} tokens`);
}

// -- charts -----------------------------------------------------------------------------------------------------------

function element(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const HEIGHT = 150, LEFT = 40, BOTTOM = 20, TOP = 8;

function frame(svg, highest, label) {
  const width = svg.clientWidth;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / highest);
  for (const value of [0, highest / 2, highest]) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  return { width, y };
}

function niceAbove(value, least) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, least)));
  return [1, 2, 4, 6, 8, 10].map((step) => step * size).find((step) => step >= Math.max(value, least));
}

function drawLine(id, points, least, label) {
  const svg = $(id);
  const known = points.filter((value) => value !== null);
  const { width, y } = frame(svg, niceAbove(Math.max(0, ...known), least), label);
  const x = (index) => width - (points.length - 1 - index) * (width - LEFT) / (SPAN - 1);
  for (const text of [["2 min ago", LEFT, "start"], ["now", width, "end"]]) {
    svg.append(element("text", { x: text[1], y: HEIGHT - 3, "text-anchor": text[2] }, text[0]));
  }
  let run = [];
  const flush = () => {
    if (run.length === 1) svg.append(element("circle", { class: "dot", cx: run[0][0], cy: run[0][1], r: 2 }));
    if (run.length > 1) {
      const path = run.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L");
      svg.append(element("path", { class: "area", d: `M${path}L${run.at(-1)[0].toFixed(1)},${y(0)}L${run[0][0].toFixed(1)},${y(0)}Z` }));
      svg.append(element("path", { class: "line", d: `M${path}` }));
    }
    run = [];
  };
  points.forEach((value, index) => (value === null ? flush() : run.push([x(index), y(value)])));
  flush();
}

function drawBars(id, bars) {
  const svg = $(id);
  const { width, y } = frame(svg, 1, percent);
  const step = (width - LEFT) / Math.max(bars.length, 6);
  bars.forEach(([name, share], index) => {
    const middle = LEFT + step * (index + 0.5);
    const half = Math.min(step * 0.36, 34);
    svg.append(element("rect", { class: "bar", x: middle - half, width: 2 * half, y: y(share), height: y(0) - y(share), rx: 2 }));
    svg.append(element("text", { x: middle, y: HEIGHT - 3, "text-anchor": "middle" }, name));
    const place = share > 0.88 ? { y: y(share) + 14, class: "inside" } : { y: y(share) - 5, class: "value" };
    svg.append(element("text", { x: middle, "text-anchor": "middle", ...place }, Math.round(100 * share)));
  });
}

function drawCharts() {
  const now = history.at(-1);
  const smooth = (measure) => history.map((sample, i) => (i === 0 ? null : measure(history[Math.max(0, i - 2)], sample)));
  drawLine("tau-chart", smooth(tau), 2, (value) => value.toFixed(value % 1 ? 1 : 0));
  const speed = (from, to) => 1000 * change(from, to, "generation_tokens_total") / (to.time - from.time);
  drawLine("speed-chart", smooth(speed), 10, count);
  const name = "spec_decode_num_draft_tokens_total";
  const since = change(history[0], now, "decoding_cycles_total") > 0 ? history[0] : ZERO;
  for (const span of document.querySelectorAll(".span")) span.textContent = since === ZERO ? "since the start" : "last two minutes";
  const drafted = byLabel(since, now, "spec_decode_num_draft_tokens_per_pos_total", "position");
  const accepted = byLabel(since, now, "spec_decode_num_accepted_tokens_per_pos_total", "position");
  const positions = [...drafted].filter(([, times]) => times > 0);
  drawBars("position-chart", positions.map(([at, times]) => [at + 1, (accepted.get(at) ?? 0) / times]));
  const sizes = [...byLabel(since, now, "spec_decode_block_size_total", "size")].filter(([, times]) => times > 0);
  const cycles = sizes.reduce((sum, [, times]) => sum + times, 0);
  drawBars("size-chart", sizes.map(([size, times]) => [size, times / cycles]));
}

// -- the loop ---------------------------------------------------------------------------------------------------------

function showState(kind, text) {
  $("state").className = kind;
  $("state").querySelector("b").textContent = text;
}

async function look() {
  try {
    const [metrics, ready] = await Promise.all([fetch("../metrics"), fetch("../ready")]);
    history.push({ time: performance.now(), values: parse(await metrics.text()) });
    if (history.length > SPAN) history.shift();
    showState(ready.ok ? "ready" : "away", ready.ok ? "ready" : "takes no new requests");
    showTiles();
    showRecalibration();
    drawCharts();
  } catch {
    showState("away", "no answer from the server");
  }
  document.documentElement.dataset.samples = history.length;
  setTimeout(look, PERIOD);
}

// -- trying a prompt --------------------------------------------------------------------------------------------------

let running = null; // the AbortController of the answer being streamed
let model = null; // the server's first; it is told only to those who have a key, if the server asks for one
const atStart = learnModel().catch(() => {});

async function learnModel() {
  const response = await fetch("../v1/models", { headers: headers() });
  if (!response.ok) return;
  model = (await response.json()).data[0];
  show("model", model?.id ?? "");
}

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of response.body) {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function ask() {
  const answer = $("answer");
  const began = performance.now();
  let first = null;
  answer.replaceChildren();
  show("result", "");
  await atStart;
  if (!model) await learnModel();
  const response = await fetch("../v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({
      ...(model ? { model: model.id } : {}),
      messages: [{ role: "user", content: $("prompt").value }],
      temperature: Number($("temperature").value),
      max_tokens: Number($("max").value),
      stream: true,
      stream_options: { include_usage: true },
      mark_draft: true,
      ...(model?.diffusion ? { diffusion: { stream_drafts: true } } : {}),
    }),
  });
  if (!response.ok) {
    if (response.status === 401) { $("key-field").hidden = false; $("key").focus(); }
    throw new Error((await response.json()).error.message);
  }
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    answer.querySelector(".sketch")?.remove(); // what stood on the canvas gives way to text, or to what stands there now
    if (event.draft) {
      const sketch = document.createElement("span");
      sketch.className = "sketch";
      sketch.textContent = event.draft.text;
      answer.append(sketch);
      answer.dataset.sketches = 1 + Number(answer.dataset.sketches ?? 0);
    }
    const text = choice?.delta.reasoning_content ?? choice?.delta.content;
    if (text) {
      first ??= performance.now();
      const piece = document.createElement("span");
      piece.className = choice.from_draft ? "drafted" : "own";
      piece.textContent = text;
      const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
      answer.append(piece);
      if (atEnd) answer.scrollTop = answer.scrollHeight;
    }
    if (event.usage) {
      const { completion_tokens: tokens, completion_tokens_details: details } = event.usage;
      const now = performance.now();
      const perPass = details.tokens_per_pass;
      const atOnce = details.canvases > 0; // a canvas's tokens come at once, so the speed is that of the whole answer
      const speed = 1000 * (atOnce ? tokens / (now - began) : (tokens - 1) / (now - first));
      const parts = [perPass ? `${perPass.toFixed(2)} tokens per pass` : `τ ${details.acceptance_length.toFixed(2)}`];
      if (tokens > 1 && first !== null) parts.push(`${speed.toFixed(0)} tokens/s`);
      parts.push(`${tokens} tokens`);
      if (first !== null) parts.push(`first after ${Math.round(first - began)} ms`);
      show("result", parts.join(" · "));
    }
  }
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  running = new AbortController();
  show("send", "Stop");
  try {
    await ask();
  } catch (error) {
    if (error.name !== "AbortError") {
      const line = document.createElement("p");
      line.className = "error";
      line.textContent = error.message;
      $("answer").append(line);
    }
  }
  running = null;
  show("send", "Ask");
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});

// -- theme ------------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = () => { document.documentElement.dataset.theme = localStorage.theme ?? (dark.matches ? "dark" : "light"); };
dark.addEventListener("change", setTheme);
$("theme").addEventListener("click", () => {
  localStorage.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme();
});
setTheme();

// A prompt in the address (#ask=…) is asked at once.
const asked = new URLSearchParams(location.hash.slice(1)).get("ask");
if (asked) {
  $("prompt").value = asked;
  $("form").requestSubmit();
}

look();
