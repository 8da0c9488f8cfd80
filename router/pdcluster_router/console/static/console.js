"use strict";
// The operators' page. It shows what /api/live sends once a second; text goes in as text, never as markup.

const $ = (id) => document.getElementById(id);
let token = "";
let mayChange = false;
let followed = null; // the request whose explanation is open
const ended = new Map(); // requests that this page saw, by id, newest last
const MAX_ENDED = 20;

function make(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// How what the operator did here ended. It stays until it is dismissed, or something else is done.
function notice(text, isBad = false) {
  $("notice-text").textContent = text;
  $("notice").className = isBad ? "bad" : "";
  $("notice").hidden = !text;
}

// What is wrong with the connection or the routers now. It goes when that is over.
function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

// ---------------------------------------------------------------- asking

function headers(extra = {}) {
  return token ? { "x-admin-token": token, ...extra } : extra;
}

async function failure(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `${reply.status} ${reply.statusText}`;
  }
}

async function read(path) {
  const reply = await fetch(path, { headers: headers() });
  if (!reply.ok) throw new Error(await failure(reply));
  return reply.json();
}

async function post(path, value, extra = {}) {
  const body = JSON.stringify(value);
  const options = { method: "POST", body, headers: headers({ "content-type": "application/json", ...extra }) };
  const reply = await fetch(path, options);
  if (!reply.ok) throw new Error(await failure(reply));
  return reply;
}

async function change(path, value) {
  try {
    notice((await (await post(path, value)).json()).message);
  } catch (error) {
    notice(error.message, true);
  }
}

// Values of a stream of server-sent events, as they come.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be aborted already
  }
}

// ---------------------------------------------------------------- numbers

function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function count(value) {
  return value >= 10000 ? `${(value / 1000).toFixed(1)}k` : `${Math.round(value * 10) / 10}`;
}

function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString();
}

function meter(part, whole) {
  const fill = make("i");
  fill.style.width = whole ? `${Math.min(100, (100 * part) / whole)}%` : "0";
  return make("span", { class: "meter" }, fill);
}

function bar(spans, whole) {
  const made = make("div", { class: "bar" });
  for (const [kind, start, end, title] of spans) {
    const piece = make("i", { class: kind, title: title || kind });
    piece.style.left = `${(100 * start) / whole}%`;
    piece.style.width = `${(100 * (end - start)) / whole}%`;
    made.append(piece);
  }
  return made;
}

function link(text, onclick) {
  return make("button", { class: "link", type: "button", onclick }, text);
}

// One cell of a row. It is made anew only when its signature changes, so that nobody's click or choice is lost.
function cell(kind, signature, fill = null) {
  return { kind, signature: String(signature), fill: fill || (() => [String(signature)]) };
}

// Make a table's body show these rows, in this order. Rows and cells that stay the same are not touched.
function sync(body, rows) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const wanted = new Set(rows.map((row) => row.key));
  for (const [key, row] of known) if (!wanted.has(key)) row.remove();
  rows.forEach(({ key, kind, cells }, place) => {
    const row = known.get(key) || make("tr");
    row.dataset.key = key;
    row.className = kind;
    cells.forEach((each, index) => {
      const shown = row.cells[index] || row.insertCell();
      shown.className = each.kind;
      if (shown.signature === each.signature) return;
      shown.signature = each.signature;
      shown.replaceChildren(...each.fill());
    });
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] || null);
  });
}

// ---------------------------------------------------------------- the cluster

function show(look) {
  if (look.error) {
    trouble(look.error);
    $("routers").replaceChildren(make("span", { class: "pill bad" }, "no router"));
    return;
  }
  trouble(look.warnings.join("; "));
  const figures = look.figures;
  $("routers").replaceChildren(
    ...figures.routers.map((router) =>
      make("span", { class: `pill ${router.status.replace(" ", "-")}`, title: router.version },
        `${router.name} ${router.status}${router.reasons.length ? `: ${router.reasons.join("; ")}` : ""}`)),
  );
  showFigures(figures);
  showModels([...new Set(figures.nodes.flatMap((node) => node.models))]);
  showNodes(figures.nodes);
  showRequests(look.requests);
  showPolicies(look.policies);
  showCaches(look.caches);
  showEvents(look.events);
}

function showModels(models) {
  const shown = [...$("chat-model").options].map((option) => option.value);
  if (models.join() === shown.join()) return;
  const chosen = $("chat-model").value;
  $("chat-model").replaceChildren(...models.map((model) => make("option", { value: model, selected: model === chosen }, model)));
}

function showFigures(figures) {
  const per = figures.since_s ? "/s" : " so far";
  const shown = [
    [count(figures.requests), `requests${per}`],
    [count(figures.output_tokens), `output tokens${per}`],
    [count(figures.prompt_tokens), `prompt tokens${per}`],
    [figures.prompt_tokens ? `${Math.round((100 * figures.cached_tokens) / figures.prompt_tokens)} %` : "–", "of them cached"],
    [count(figures.held), "held"],
    [count(figures.errors), `errors${per}`],
  ];
  for (const [title, values] of Object.entries(figures.latencies)) {
    shown.push([`${seconds(values.p50)} / ${seconds(values.p99)}`, `${title}, p50 / p99`]);
  }
  $("figures").replaceChildren(...shown.map(([value, title]) => make("div", {}, make("b", {}, value), make("span", {}, title))));
}

function showNodes(nodes) {
  const pools = new Map();
  for (const node of nodes) pools.set(node.role, [...(pools.get(node.role) || []), node]);
  $("pools").replaceChildren(
    ...[...pools].map(([role, members]) => {
      const ready = members.filter((node) => node.state === "ready").length;
      const sum = (name) => members.reduce((total, node) => total + node.load[name], 0);
      const total = sum("pages_total");
      return make("span", {}, make("b", {}, role), ` ${ready} of ${members.length} ready, ${sum("running")} running, `,
        `${sum("waiting")} waiting, KV `, meter(total - sum("pages_free") - sum("pages_cached"), total));
    }),
  );
  sync($("nodes").tBodies[0], nodes.map(nodeRow));
}

function nodeRow(node) {
  const isCordoned = node.state === "cordoned";
  const used = node.load.pages_total - node.load.pages_free - node.load.pages_cached;
  const slow = node.slow.length ? ` slow: ${node.slow.join(", ")}` : "";
  return { key: node.incarnation, kind: "", cells: [
    cell("", node.name, () => [link(node.name, () => describe(node.name))]),
    cell("", `${node.role} ${mayChange}`, () => [mayChange ? roleChoice(node) : node.role]),
    cell(node.state, `${node.state}${slow}`, () => [node.state, slow ? make("b", { class: "bad" }, slow) : ""]),
    cell("number", node.waiting),
    cell("number", `${node.running} of ${node.load.slots}`),
    cell("", `${used} ${node.load.pages_total}`, () => [meter(used, node.load.pages_total), node.kv_used]),
    cell("number", seconds(node.prefill_s)),
    cell("number", seconds(node.step_s)),
    cell("number", seconds(node.itl_s)),
    cell("change", isCordoned, () => [
      action(isCordoned ? "Uncordon" : "Cordon", node.name, () => change("/api/cordon", { node: node.name, cordoned: !isCordoned })), " ",
      action("Drain", node.name, () => drain(node.name))]),
  ] };
}

// A button that says of what to those who do not see the row.
function action(verb, name, onclick) {
  return make("button", { type: "button", ariaLabel: `${verb} ${name}`, title: `${verb} ${name}`, onclick }, verb);
}

function roleChoice(node) {
  const roles = ["prefill", "decode", "mixed"].map((role) => make("option", { value: role, selected: role === node.role }, role));
  const choose = (event) => {
    const role = event.target.value;
    event.target.value = node.role; // the next look shows what became of it
    if (confirm(`Make ${node.name} a ${role} node? It is a ${node.role} node now.`)) change("/api/role", { node: node.name, role });
  };
  return make("select", { ariaLabel: `Role of ${node.name}`, onchange: choose }, ...roles);
}

async function drain(node) {
  if (!confirm(`Drain ${node}? It takes no new work, and after ten minutes its requests move to other nodes.`)) return;
  try {
    for await (const told of events(await post("/api/drain", { node }))) {
      notice(told.error ? told.error.message : told.message || told.progress, Boolean(told.error));
    }
  } catch (error) {
    notice(error.message, true);
  }
}

async function describe(name) {
  try {
    const node = await read(`/api/node/${encodeURIComponent(name)}`);
    followed = null;
    openDetail(name, [], JSON.stringify(node, null, 2));
  } catch (error) {
    notice(error.message, true);
  }
}

// ---------------------------------------------------------------- requests

function liveSpans(request) {
  const spans = [];
  const placed = request.placed_s === null ? request.age_s : request.placed_s;
  if (placed > 0.005) spans.push(["held", 0, placed]);
  if (request.placed_s === null) return spans;
  spans.push(["prefill", placed, request.ttft_s === null ? request.age_s : Math.max(request.ttft_s, placed)]);
  if (request.ttft_s !== null) spans.push(["decode", request.ttft_s, request.age_s]);
  return spans;
}

function showRequests(requests) {
  const open = new Set(requests.map((request) => request.name));
  for (const request of requests) {
    ended.delete(request.name);
    ended.set(request.name, { ...request, state: "ended", record: null });
  }
  const over = [...ended.values()].filter((request) => !open.has(request.name)).slice(-MAX_ENDED).reverse();
  for (const name of [...ended.keys()]) {
    if (!open.has(name) && !over.some((request) => request.name === name)) ended.delete(name);
  }
  over.filter((request) => request.record === null).forEach(fetchRecord);
  const oldest = Math.max(0.001, ...requests.map((request) => request.age_s));
  $("requests-note").textContent = `${requests.length} open`;
  sync($("requests").tBodies[0], [
    ...requests.slice(0, 100).map((request) => requestRow(request, oldest, true)),
    ...over.map((request) => requestRow(request, Math.max(oldest, request.age_s), false))]);
}

// How a request really ended, once: the last look at it is up to a second old.
async function fetchRecord(request) {
  request.record = {};
  try {
    const found = (await read(`/api/explain/${encodeURIComponent(request.name)}`)).records.find((each) => each.request === request.name);
    if (!found || !found.outcome || !found.spans.length) return;
    request.record = found;
    request.output_tokens = found.outcome.output_tokens;
    request.age_s = Math.max(...found.spans.map((span) => span.end));
  } catch {
    // The router is gone, or knows it no more. What was seen last stays.
  }
}

function recordSpans(record) {
  return record.spans.filter((span) => KINDS[span.name]).map((span) => [KINDS[span.name], span.start, span.end, span.name]);
}

function requestRow(request, whole, isOpen) {
  const route = request.mode === "remote" ? `${request.prefill} → ${request.decode}` : request.decode || request.prefill || "–";
  return { key: request.name, kind: isOpen ? "" : "faint", cells: [
    cell("", request.name, () => [link(request.name, () => explain(request.name))]),
    cell("", request.state),
    cell("", route),
    cell("number", request.prompt_tokens),
    cell("number", isOpen || request.record.spans ? request.output_tokens : `≥ ${request.output_tokens}`),
    cell("number", seconds(request.age_s)),
    cell("time", `${request.age_s} ${request.ttft_s} ${whole}`, () =>
      [bar(!isOpen && request.record.spans ? recordSpans(request.record) : liveSpans(request), whole)]),
    cell("change", isOpen, () => (isOpen ? [action("Cancel", request.name, () => cancel(request.name))] : [])),
  ] };
}

function cancel(request) {
  if (confirm(`Cancel request ${request}? Its client gets an error.`)) change("/api/cancel", { request });
}

const KINDS = { "held, tried": "held", "queue": "queue", "prefill": "prefill", "KV transfer": "transfer", "decode": "decode" };

function spanRows(record) {
  const whole = Math.max(0.000001, ...record.spans.map((span) => span.end));
  return record.spans.flatMap((span) => {
    const kind = KINDS[span.name] || "mark";
    const pieces = span.faint === null ? [[kind, span.start, span.end]]
      : [[kind, span.start, Math.max(span.start, Math.min(span.faint, span.end))], [`${kind} faded`, Math.max(span.start, span.faint), span.end]];
    const took = span.start === span.end ? span.end : span.end - span.start;
    return [make("span", {}, span.name), make("span", { class: "number" }, seconds(took)),
      make("div", { title: span.note }, bar(pieces, whole * 1.005))];
  });
}

async function explain(request) {
  followed = request;
  try {
    const found = await read(`/api/explain/${encodeURIComponent(request)}`);
    if (followed === request) openDetail(request, found.records, found.text);
  } catch (error) {
    notice(error.message, true);
  }
}

function openDetail(title, records, text) {
  $("detail-id").textContent = title;
  $("detail-spans").replaceChildren(
    ...records.filter((record) => record.spans.length).map((record) =>
      make("div", {}, make("p", { class: "route" }, routeOf(record)), make("div", { class: "spans" }, ...spanRows(record)))));
  $("detail-text").textContent = text;
  $("detail").hidden = false;
  $("detail").scrollIntoView({ block: "nearest" });
}

function routeOf(record) {
  const outcome = record.outcome;
  const nodes = outcome.mode === "remote" ? `${outcome.prefill} → ${outcome.decode} over ${outcome.transfer}` : `${outcome.decode || outcome.prefill} alone`;
  const trace = record.trace ? `, trace ${record.trace}` : "";
  return `${record.request}: ${nodes}, ${outcome.attempts} attempt${outcome.attempts === 1 ? "" : "s"}, ${outcome.output_tokens} tokens${trace}`;
}

// ---------------------------------------------------------------- policy, caches, events

function showPolicies(policies) {
  $("policies").replaceChildren(...policies.map((policy) => {
    const share = policy.watched ? `${((100 * policy.agreed) / policy.watched).toFixed(1)} % of ${policy.watched} decisions` : "no decision yet";
    const shadow = policy.shadow ? `, shadow ${policy.shadow} agreed on ${share}` : ", no shadow";
    return make("p", {}, make("b", {}, policy.name), shadow,
      policy.watched ? make("br") : null, policy.watched ? meter(policy.agreed, policy.watched) : null,
      make("span", { class: "faint" }, ` ${policies.length > 1 ? policy.router : ""}`));
  }));
  if (policies.length) $("policy-live").title = $("policy-shadow").title = `known: ${policies[0].known.join(", ")}`;
}

function showCaches(caches) {
  const most = Math.max(1, ...caches.map((cache) => cache.blocks));
  $("caches").replaceChildren(...caches.map((cache) =>
    make("div", {}, meter(cache.blocks, most), `${cache.name} ${cache.blocks} blocks${cache.is_exact ? "" : ", not all known yet"}`)));
}

let lastEvent = "";
function showEvents(found) {
  const newest = found.length ? `${found.at(-1).router} ${found.at(-1).sequence}` : "";
  if (newest === lastEvent) return;
  lastEvent = newest;
  $("events").replaceChildren(...found.slice().reverse().map((event) =>
    make("li", {}, make("time", {}, clock(event.at)), make("b", {}, event.kind), ` ${event.subject} ${event.message}`)));
}

// ---------------------------------------------------------------- chat

const turns = [];
let speaking = null;

async function chat(text) {
  turns.push({ role: "user", content: text });
  const log = $("chat-log");
  log.append(make("p", { class: "turn" }, make("b", {}, "you "), text));
  const answer = make("span");
  const route = make("p", { class: "route" });
  log.append(make("p", { class: "turn" }, make("b", {}, "model "), answer), route);
  speaking = new AbortController();
  $("chat-send").disabled = true;
  $("chat-stop").hidden = false;
  let said = "";
  try {
    const key = $("chat-key").value;
    const body = JSON.stringify({ model: $("chat-model").value, messages: turns, max_tokens: Number($("chat-tokens").value) });
    const reply = await fetch("/api/chat", { method: "POST", body, signal: speaking.signal,
      headers: headers({ "content-type": "application/json", ...(key ? { "x-api-key": key } : {}) }) });
    if (!reply.ok) throw new Error(await failure(reply));
    for await (const chunk of events(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      said += chunk.choices?.[0]?.delta?.content || "";
      answer.textContent = said;
      log.scrollTop = log.scrollHeight;
      if (chunk.usage) showRoute(route, chunk);
    }
    turns.push({ role: "assistant", content: said });
  } catch (error) {
    turns.pop();
    route.textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    speaking = null;
    $("chat-send").disabled = false;
    $("chat-stop").hidden = true;
    log.scrollTop = log.scrollHeight;
  }
}

function showRoute(place, chunk) {
  const usage = chunk.usage;
  const route = usage.pdcluster || {};
  const nodes = route.mode === "remote" ? `${route.prefill} → ${route.decode} over ${route.transfer}` : `${route.decode || route.prefill} alone`;
  const first = route.timeline ? `, first token after ${seconds(route.timeline.ttft_s)}` : "";
  place.replaceChildren(`${nodes}${first}, ${usage.completion_tokens} tokens `,
    make("button", { class: "link", type: "button", onclick: () => explain(chunk.id) }, "explain"));
}

// ---------------------------------------------------------------- the page

async function openSession() {
  const session = await read("/api/session");
  mayChange = session.may_change;
  document.body.classList.toggle("read-only", !mayChange);
  $("rights").textContent = mayChange ? "may change" : "read-only";
  $("rights").className = mayChange ? "good" : "faint";
  $("token").hidden = !session.has_token;
  $("session").querySelector("button").hidden = !session.has_token;
  return !session.wants_token;
}

async function watch() {
  for (;;) {
    try {
      if (!(await openSession())) {
        trouble("This console wants the admin token.");
        return;
      }
      const reply = await fetch("/api/live", { headers: headers() });
      if (!reply.ok) throw new Error(await failure(reply));
      for await (const look of events(reply)) show(look);
      throw new Error("the console closed the connection");
    } catch (error) {
      trouble(`${error.message}; trying again`);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  $("notice-close").addEventListener("click", () => notice(""));
  $("session").addEventListener("submit", async (event) => {
    event.preventDefault();
    token = $("token").value;
    const isKnown = await openSession();
    notice(mayChange ? "" : "This is not the admin token.", true);
    if (isKnown) trouble("");
    if (isKnown) $("token").value = "";
    if (isKnown && $("routers").querySelector(".wait")) watch();
  });
  $("lookup").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("lookup-id").value) explain($("lookup-id").value.trim());
  });
  $("detail-close").addEventListener("click", () => { followed = null; $("detail").hidden = true; });
  $("policy").addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = {};
    if ($("policy-live").value) wanted.live = $("policy-live").value.trim();
    if ($("policy-shadow").value) wanted.shadow = $("policy-shadow").value.trim();
    change("/api/policy", wanted);
  });
  $("chat").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("chat-text").value.trim();
    if (text && !speaking) { $("chat-text").value = ""; chat(text); }
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("chat").requestSubmit(); }
  });
  $("chat-stop").addEventListener("click", () => speaking?.abort());
  watch();
});
