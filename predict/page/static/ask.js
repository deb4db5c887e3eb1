// Forms of questions: their fields, the body of a request, the command that gives the same answer, and the link.

const names = (list) => list.map((name) => [name, name]);
const SETTINGS = "settings";
const PAIRS = "pairs";
const RUN = "run";
// A server that compiles nothing takes auto for fused, which a command line does not.
const LOWERINGS = DATA.compiles ? ["auto", "xla", "fused", "op"] : ["fused", "op"];
const WORKLOADS = [["", "the program below"], ...names([...Object.keys(DATA.zoo), ...Object.keys(DATA.presets)])];
// Fields of a question: what the server calls it, in words, and how it is typed. `place` says where it goes when
// it is not a key of the body itself; `flag` is the option of the command.
const CONFIG = { name: "config", text: "or its config.json", kind: "long", broad: true };
const MODEL = { name: "workload", text: "Model", kind: "list", of: DATA.workloads };
const TRAINED = [
  { name: "batch", text: "Sequences a step", kind: "number", place: SETTINGS, first: "64" },
  { name: "seq", text: "Tokens of a sequence", kind: "number", place: SETTINGS },
  { name: "layers", text: "Layers, if not the model's", kind: "number", place: SETTINGS },
  { name: "framework", text: "Framework", hint: "nemo, megatron …" },
  { name: "price", text: "Price of a device for an hour, $", kind: "number" },
];
const TOKENS = { name: "tokens", text: "Tokens to train on, in 10⁹", kind: "number" };
const CLUSTER = { name: "cluster", text: "Cluster", kind: "list", of: DATA.clusters, needed: true, first: "dgx-h100-x16" };
const FIELDS = {
  program: [
    { name: "device", text: "Devices", kind: "devices", broad: true },
    { name: "workload", text: "Workload", kind: "choice", of: WORKLOADS },
    { name: "settings", text: "Its settings", hint: "batch=8,dtype=bf16", place: PAIRS, broad: true },
    { name: "program", text: "Program: StableHLO or HLO, typed or dropped here", kind: "text", broad: true },
    { name: "lowering", text: "Lowering", kind: "choice", of: names(LOWERINGS) },
    { name: "model", text: "Model of kernels", kind: "choice", of: [["", "default"], ...names(DATA.models)] },
    { name: "trip_count", text: "Trips of loops without a count", kind: "number" },
  ],
  training: [
    { ...MODEL, first: "llama-3-8b" },
    CLUSTER,
    { name: "plan", text: "Plan", hint: "tp=8,dp=2", first: "tp=8,dp=2" },
    ...TRAINED,
    { ...TOKENS, place: RUN },
    CONFIG,
  ],
  plans: [
    { ...MODEL, first: "llama-3-8b" },
    CLUSTER,
    { name: "grid", text: "Axes, if not all", hint: "tp=4/8,recompute=none" },
    ...TRAINED,
    { ...TOKENS, place: "page" },
    CONFIG,
  ],
  serving: [
    { ...MODEL, first: "llama-3.1-8b" },
    { name: "device", text: "Device", kind: "list", of: DATA.devices.map((d) => d.name), first: "h100-sxm" },
    { name: "cluster", text: "Cluster, if not one device", kind: "list", of: DATA.clusters },
    { name: "plan", text: "Plan", hint: "tp=2" },
    { name: "framework", text: "Engine", kind: "list", of: DATA.frameworks, first: "vllm" },
    { name: "weights", text: "Format of weights", hint: "fp8" },
    { name: "prompt", text: "Tokens of a prompt", hint: "1024" },
    { name: "output", text: "Tokens of an answer", hint: "256" },
    { name: "rate", text: "Requests a second", kind: "number", first: "4" },
    { name: "concurrency", text: "or requests at once", kind: "number" },
    { name: "count", text: "Requests", kind: "number", first: "200" },
    { name: "slo", text: "Objective", hint: "ttft=500ms,tpot=30ms" },
    { name: "price", text: "Price of a device for an hour, $", kind: "number" },
    CONFIG,
  ],
  deployments: [
    { ...MODEL, first: "llama-3.1-8b" },
    { name: "device", text: "Device", kind: "list", of: DATA.devices.map((d) => d.name), needed: true, first: "h100-sxm" },
    { name: "gpus", text: "Devices at most", kind: "number", needed: true, first: "2" },
    { name: "framework", text: "Engine", kind: "list", of: DATA.frameworks, first: "vllm" },
    { name: "weights", text: "Format of weights", hint: "fp8" },
    { name: "load", text: "Load", needed: true, broad: true, first: "rate=4,prompt=1024,output=256,count=200" },
    { name: "slo", text: "Objective", hint: "ttft=500ms,tpot=30ms", first: "tpot=30ms" },
    { name: "price", text: "Price of a device for an hour, $", kind: "number" },
    CONFIG,
  ],
};
const PATHS = {
  program: "/v1/predict/program",
  training: "/v1/simulate",
  plans: "/v1/sweep",
  serving: "/v1/simulate-serving",
  deployments: "/v1/plan-serving",
};
const COMMANDS = { training: "simulate", plans: "sweep", serving: "simulate-serving", deployments: "plan-serving" };

// A question with what a newcomer would ask first.
function firstQuestion(kind) {
  const query = {};
  for (const field of FIELDS[kind]) if (field.first) query[field.name] = field.first;
  return kind === "program" ? { device: "h100-sxm", program: DATA.example } : query;
}

const devicesOf = (query) => (query.device || "").split(",").filter(Boolean);
// Settings such as batch=8,dtype=bf16, and back.
const pairsOf = (text) =>
  Object.fromEntries(
    (text || "")
      .split(",")
      .filter((pair) => pair.trim())
      .map((pair) => pair.split("=").map((part) => part.trim()))
      .map(([name, value]) => [name, value ?? ""]),
  );
const textOf = (pairs) =>
  Object.entries(pairs)
    .map(([name, value]) => `${name}=${value}`)
    .join(",");

// The body of the request; of a program, for one device.
function bodyOf(kind, query, device) {
  const body = {};
  for (const { name, kind: typed, place } of FIELDS[kind]) {
    const text = name === "device" && device ? device : (query[name] || "").trim();
    if (!text || place === "page" || (name === "workload" && query.config)) continue;
    const value = typed === "number" ? Number(text) : text;
    if (place === SETTINGS) (body.settings ||= {})[name] = value;
    else if (place === RUN) body.run = { [name]: value * 1e9 };
    else body[name] = place === PAIRS ? pairsOf(text) : value;
  }
  if (body.program && bytes) Object.assign(body, { program: bytes, encoding: "base64" });
  return body;
}

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// The command line that gives the same answer.
function commandOf(kind, query) {
  if (kind === "program") return programCommand(query, query.device || "");
  const parts = ["opcast", COMMANDS[kind]];
  for (const { name, place } of FIELDS[kind]) {
    const text = (query[name] || "").trim();
    if (!text || place === "page" || (name === "workload" && query.config)) continue;
    if (name === "config") parts.push("--hf", "config.json");
    else if (place === SETTINGS) parts.push("--set", quoted(`${name}=${text}`));
    else if (place === RUN) parts.push("--run", quoted(`${name}=${text}e9`));
    else parts.push(`--${name.replaceAll("_", "-")}`, quoted(text));
  }
  return [...parts, ...(kind === "plans" ? ["--out", "plans"] : [])].join(" ");
}

// Of a program, on devices or a device file; a workload is written first.
function programCommand(query, device, ...more) {
  const { workload, settings } = query;
  const of = Object.keys(pairsOf(settings)).length ? ["--set", quoted(textOf(pairsOf(settings)))] : [];
  const made = workload ? ["opcast", "zoo", "export", workload, ...of, "--out", "program.mlir"] : [];
  const options = ["lowering", "model", "trip_count"].filter((name) => query[name]);
  const named = options.flatMap((name) => [`--${name.replaceAll("_", "-")}`, quoted(query[name])]);
  const asks = ["opcast", "predict", "program.mlir", "--device", quoted(device), ...named, ...more];
  return [made, asks].map((words) => words.join(" ")).join("\n").trim();
}

// The same in Python: a program by the library, others by this server.
function pythonOf(kind, query) {
  if (kind === "program") {
    const { workload, settings, lowering } = query;
    const own = [JSON.stringify(workload), JSON.stringify([textOf(pairsOf(settings))])];
    const made = workload
      ? `from opcast.datagen.zoo import export, parse_settings\n` +
        `export(${own[0]}, parse_settings(${own.join(", ")}), "program.mlir")\n`
      : "";
    const trips = query.trip_count ? `, trip_counts=${query.trip_count}` : "";
    const named = { lowering, model: query.model };
    const how = Object.entries(named).map(([name, text]) => (text ? `, ${name}=${JSON.stringify(text)}` : "")).join("") + trips;
    return (
      `import opcast\n${made}for device in ${JSON.stringify(devicesOf(query))}:\n` +
      `    print(opcast.predict("program.mlir", device=device${how}))`
    );
  }
  const body = JSON.stringify(bodyOf(kind, query), null, 4);
  // A search takes longer than httpx waits by default.
  const how = DATA.secured ? `timeout=None, headers={"Authorization": "Bearer TOKEN"}` : "timeout=None";
  return `import httpx\nprint(httpx.post("${location.origin}${PATHS[kind]}", ${how}, json=${body}).json())`;
}

// A question as the part of a link after its #, and back. A long program does not fit into a link.
const LONGEST = 6000;
function linkOf(kind, query) {
  const kept = Object.entries(query).filter(([, text]) => text && text.length <= LONGEST);
  return `#${kind}?${new URLSearchParams(kept)}`;
}
function questionOf(hash) {
  const [kind, rest] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const query = Object.fromEntries(new URLSearchParams(rest || ""));
  // Else the command beside it would choose for itself.
  if (kind === "program" && rest) query.lowering ||= LOWERINGS[0];
  return [kind, query];
}

// The form of a question; `ask` gets what was typed.
function questionForm(kind, query, ask) {
  const inputs = FIELDS[kind].map((field) => [field, input(field, query[field.name] || "")]);
  const read = () => Object.fromEntries(inputs.map(([{ name }, own]) => [name, own.read()]));
  const form = el(
    "form",
    {
      class: "ask",
      onsubmit: (event) => {
        event.preventDefault();
        ask(read());
      },
    },
    inputs.map(([field, own]) =>
      field.kind === "devices"
        ? own.node
        : el("label", { class: field.broad ? "broad" : null }, field.text, own.node, own.more),
    ),
    el("button", { type: "submit" }, "Predict"),
  );
  if (kind === "program") chooseWorkload(Object.fromEntries(inputs.map(([{ name }, own]) => [name, own.node])));
  return form;
}

// A workload stands in place of the program; a model by name is one of the zoo with its sizes.
function chooseWorkload({ workload, settings, program }) {
  const follow = () => {
    const chosen = workload.value;
    program.disabled = program.parentNode.hidden = Boolean(chosen);
    settings.disabled = !chosen;
    settings.placeholder = chosen ? textOf(DATA.zoo[chosen]) : "of a workload";
  };
  workload.addEventListener("change", () => {
    const preset = DATA.presets[workload.value];
    if (preset) workload.value = preset.workload;
    settings.value = preset ? preset.settings : "";
    follow();
  });
  follow();
}

function input(field, value) {
  if (field.kind === "devices") return deviceChips(field, value);
  if (field.kind === "text") return droppable(field, value);
  if (field.kind === "choice") {
    const node = picker(field.text, field.of, () => {});
    node.value = value || field.of[0][0];
    node.name = field.name;
    return { node, read: () => node.value };
  }
  if (field.kind === "long") {
    const node = el("textarea", { name: field.name, spellcheck: "false", class: "short" });
    node.value = value;
    return { node, read: () => node.value };
  }
  const known = (field.kind === "list" ? field.of : []).map((value) => el("option", { value }));
  const list = known.length ? el("datalist", { id: `known-${field.name}` }, known) : null;
  const node = el("input", {
    name: field.name,
    value,
    required: field.needed,
    placeholder: field.hint,
    list: list ? list.id : null,
    type: field.kind === "number" ? "number" : null,
    step: field.kind === "number" ? "any" : null,
    min: field.kind === "number" ? "0" : null,
    autocomplete: "off",
  });
  return { node, more: list, read: () => (node.disabled ? "" : node.value) };
}

// Devices to tick: the ticked ones, then those that were learned from.
function deviceChips(field, value) {
  const chosen = new Set(value.split(","));
  const rank = ({ name, learned }) => 2 * chosen.has(name) + learned;
  const order = [...DATA.devices].sort((a, b) => rank(b) - rank(a) || a.name.localeCompare(b.name));
  const boxes = order.map(({ name, learned, platform }) =>
    el(
      "label",
      { title: `${platform}, ${learned ? "learned from" : "by its data sheet"}` },
      el("input", { type: "checkbox", name: "device", value: name, checked: chosen.has(name) }),
      name,
    ),
  );
  const legend = el("legend", { class: "small soft" }, field.text);
  const node = el("fieldset", { class: "picked broad" }, legend, boxes);
  return { node, read: () => [...node.querySelectorAll(":checked")].map((box) => box.value).join(",") };
}

// A text into which a file may be dropped; files that are no text are kept, as base64.
let bytes = null;
const base64 = (file) =>
  new Promise((done) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result.split(",")[1] || ""));
    reader.readAsDataURL(file);
  });
function droppable(field, value) {
  const node = el("textarea", { name: field.name, spellcheck: "false" });
  node.value = value;
  node.addEventListener("input", () => (bytes = null));
  const take = async (file) => {
    if (!file) return;
    const raw = new Uint8Array(await file.arrayBuffer());
    bytes = raw.includes(0) ? await base64(file) : null;
    node.value = bytes ? `${file.name}: ${size(raw.length)} of bytecode` : new TextDecoder().decode(raw);
  };
  node.addEventListener("dragover", (event) => {
    event.preventDefault();
    node.classList.add("over");
  });
  node.addEventListener("dragleave", () => node.classList.remove("over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    node.classList.remove("over");
    take(event.dataTransfer.files[0]);
  });
  const file = el("input", { type: "file", "aria-label": "File of a program" });
  file.addEventListener("change", () => take(file.files[0]));
  return { node, more: file, read: () => (node.disabled ? "" : node.value) };
}

// The server's answer; refusals are thrown with what it says.
async function asked(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (DATA.secured) headers.Authorization = `Bearer ${token()}`;
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({ what: `status ${answer.status}` }));
  if (answer.status === 401) forgetToken();
  throw Object.assign(new Error(said.what), said);
}

function token() {
  let known = sessionStorage.getItem("opcast-token");
  if (!known) {
    known = prompt("This server asks for a token:") || "";
    sessionStorage.setItem("opcast-token", known);
  }
  return known;
}
const forgetToken = () => sessionStorage.removeItem("opcast-token");
