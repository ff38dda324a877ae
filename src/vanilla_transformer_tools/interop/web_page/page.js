// Translates what is typed, line by line and greedily, with transformers.js.
import {
  AutoModelForSeq2SeqLM, AutoTokenizer, InterruptableStoppingCriteria, Tensor, env,
} from "transformers";

const MOST_CHARACTERS = 5000, PAUSE = 250;
const byId = id => document.getElementById(id);
const source = byId("source"), list = byId("translations"), language = byId("language");
const say = text => { byId("status").textContent = text; };

env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = new URL("./", location.href).pathname;
// A later export at this address is not the same model.
env.useBrowserCache = env.useWasmCache = false;
// ONNX Runtime computes in a worker, and the page stays responsive.
Object.assign(env.backends.onnx.wasm, {
  proxy: true,
  wasmPaths: { wasm: new URL("./runtime/ort-wasm-simd-threaded.wasm", location.href).href },
});

let facts, tokenizer, targetTokenizer, model, stop;
let running = Promise.resolve();
const known = new Map();

async function load() {
  const begin = performance.now();
  facts = await (await fetch("page.json")).json();
  document.title = byId("heading").ariaLabel = facts.title;
  document.querySelector("h1").textContent = facts.title;
  for (const [label, text] of Object.entries(facts.facts)) {
    byId("facts").append(element("dt", label), element("dd", text));
  }
  for (const [name, id] of Object.entries(facts.languages)) {
    language.append(new Option(name, id));
    language.hidden = false;
  }
  tokenizer = await AutoTokenizer.from_pretrained("model");
  targetTokenizer = facts.targetTokenizer
    ? await AutoTokenizer.from_pretrained("model/target_tokenizer") : tokenizer;
  model = await AutoModelForSeq2SeqLM.from_pretrained("model", {
    progress_callback: ({ status, progress }) =>
      status === "progress_total" && say(`Loading the model: ${Math.round(progress)} %`),
  });
  say(`Ready after ${seconds(begin)}. Type some text.`);
  source.addEventListener("input", debounced(schedule));
  language.addEventListener("input", schedule);
  // A browser may have kept the text of an earlier visit.
  if (source.value) schedule();
}

// Only the latest text is translated: what runs for an earlier one stops at its next token.
function schedule() {
  stop?.interrupt();
  const mine = stop = new InterruptableStoppingCriteria();
  running = running.then(() => translate(mine)).catch(error => say(`Failed: ${error.message}`));
}

async function translate(mine) {
  if (mine.interrupted) return;
  byId("download").hidden = true;
  list.replaceChildren();
  const text = source.value;
  if (text.length > MOST_CHARACTERS) {
    say(`A text has at most ${count(MOST_CHARACTERS)} characters here, got ${count(text.length)}. `
      + "Shorten it.");
    return;
  }
  if (!text.trim()) return say("Type some text.");
  say("Translating …");
  const begin = performance.now();
  let tokens = 0;
  const lines = text.split(/\r?\n/);
  const items = lines.map(line => element("li", line.trim() && "…", "pending"));
  for (const item of items) item.dir = "auto";
  list.replaceChildren(...items);
  for (const [place, line] of lines.entries()) {
    const found = await translated(line.toWellFormed?.() ?? line, mine);
    if (mine.interrupted) return;
    items[place].textContent = found.text;
    items[place].className = found.fault ? "fault" : "";
    tokens += found.tokens;
  }
  const rate = Math.round(1000 * tokens / (performance.now() - begin));
  say(`Done in ${seconds(begin)}` + (tokens ? `, ${count(rate)} tokens a second.` : "."));
  const download = byId("download");
  URL.revokeObjectURL(download.href);
  const all = items.map(item => item.className ? "" : item.textContent).join("\n");
  download.href = URL.createObjectURL(new Blob([all, "\n"], { type: "text/plain" }));
  download.hidden = false;
}

async function translated(line, mine) {
  if (!line.trim()) return { text: "", tokens: 0 };
  const key = `${language.value}\n${line}`;
  if (known.has(key)) return { ...known.get(key), tokens: 0 };
  const ids = tokenizer(line, { return_tensor: false }).input_ids;
  if (language.value) ids.unshift(Number(language.value));
  if (ids.length > facts.longestSource) {
    return {
      text: `A line has at most ${facts.longestSource} tokens, got ${count(ids.length)}. Split it.`,
      tokens: 0, fault: true,
    };
  }
  const tensor = values => new Tensor("int64", BigInt64Array.from(values), [1, ids.length]);
  const output = await model.generate({
    inputs: tensor(ids.map(BigInt)),
    attention_mask: tensor(ids.map(() => 1n)),
    max_new_tokens: Math.min(ids.length + facts.extraTokens, facts.longestOutput),
    num_beams: 1,
    stopping_criteria: mine,
  });
  const generated = output[0].tolist();
  let text = targetTokenizer.decode(generated, { skip_special_tokens: true });
  if (facts.composes) text = text.normalize("NFC");
  const found = { text, tokens: generated.length - 1 };
  if (!mine.interrupted) known.set(key, found);
  return found;
}

function element(name, text, className = "") {
  return Object.assign(document.createElement(name), { textContent: text, className });
}

function debounced(act, timer) {
  return () => { clearTimeout(timer); timer = setTimeout(act, PAUSE); };
}

const count = number => number.toLocaleString("en");
const seconds = begin => `${((performance.now() - begin) / 1000).toFixed(1)} s`;

load().catch(error => say(`The model cannot be loaded: ${error.message}`));
