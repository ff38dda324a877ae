// Translates what is typed, line by line and greedily, with transformers.js.
import {
  AutoModelForSeq2SeqLM, AutoTokenizer, InterruptableStoppingCriteria, Tensor, env,
} from "transformers";

const MOST_CHARACTERS = 5000, PAUSE = 250, EXTRA_TOKENS = 50;
const byId = id => document.getElementById(id);
const element = (name, textContent) => Object.assign(document.createElement(name), { textContent });
const seconds = begin => `${((performance.now() - begin) / 1000).toFixed(1)} s`;
const say = text => { byId("status").textContent = text; };

env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = new URL("./", location.href).pathname;
// A later export at this address is another model.
env.useBrowserCache = env.useWasmCache = false;
// ONNX Runtime computes in a worker, and the page stays responsive.
Object.assign(env.backends.onnx.wasm, {
  proxy: true,
  wasmPaths: { wasm: new URL("./runtime/ort-wasm-simd-threaded.wasm", location.href).href },
});

const facts = {};
let tokenizer, targetTokenizer, model, stop, running = Promise.resolve();

async function load() {
  const begin = performance.now();
  const read = async name => (await fetch(`model/${name}`)).json();
  const config = await read("config.json"), run = await read("run.json");
  const own = await read("tokenizer_config.json"), { vocab } = (await read("tokenizer.json")).model;
  const folder = Object.keys(run.files).some(name => name.startsWith("target_tokenizer")) ? "target_tokenizer/" : "";
  const target = await read(`${folder}tokenizer_config.json`);
  // What the config leaves out has the value that Marian's class gives it.
  const trained = run.settings ?? {}, positions = config.max_position_embeddings ?? 1024;
  facts.longestSource = Math.min(trained.max_length ?? positions, positions);
  // The start token has a position, too.
  facts.longestOutput = positions - 1;
  for (const token of own.additional_special_tokens ?? []) {
    const tag = /^<2(.+)>$/.exec(token);
    if (tag) byId("language").append(new Option(tag[1], vocab[token]));
  }
  byId("language").hidden = !byId("language").options.length;
  const lines = [trained.language?.join(" → "), trained.license && `Licence: ${trained.license}`];
  byId("facts").append(...lines.filter(Boolean).map(line => element("li", line)));
  tokenizer = await AutoTokenizer.from_pretrained("model");
  targetTokenizer = folder ? await AutoTokenizer.from_pretrained(`model/${folder}`) : tokenizer;
  model = await AutoModelForSeq2SeqLM.from_pretrained("model", {
    progress_callback: ({ status, progress }) =>
      status === "progress_total" && say(`Loading the model: ${Math.round(progress)} %`),
  });
  say(`Ready after ${seconds(begin)}. Type some text.`);
  let timer;
  const wait = () => { clearTimeout(timer); timer = setTimeout(schedule, PAUSE); };
  for (const id of ["source", "language"]) byId(id).addEventListener("input", wait);
  // A browser may have kept the text of an earlier visit.
  if (byId("source").value) schedule();
}

// Only the latest text is translated: a translation of an earlier one stops at its next token.
function schedule() {
  stop?.interrupt();
  const mine = stop = new InterruptableStoppingCriteria();
  running = running.then(() => translate(mine)).catch(error => say(`Failed: ${error.message}`));
}

async function translate(mine) {
  if (mine.interrupted) return;
  const text = byId("source").value, begin = performance.now();
  byId("translations").replaceChildren();
  if (text.length > MOST_CHARACTERS) {
    return say(`A text has at most ${MOST_CHARACTERS} characters here, got ${text.length}.`);
  }
  if (!text.trim()) return say("Type some text.");
  say("Translating …");
  for (const line of text.split(/\r?\n/)) {
    const item = Object.assign(element("li", ""), { dir: "auto" });
    byId("translations").append(item);
    if (line.trim()) item.textContent = await translated(line.toWellFormed?.() ?? line, mine);
    if (mine.interrupted) return;
  }
  say(`Done in ${seconds(begin)}.`);
}

async function translated(line, mine) {
  const ids = tokenizer(line, { return_tensor: false }).input_ids;
  if (byId("language").value) ids.unshift(Number(byId("language").value));
  if (ids.length > facts.longestSource) {
    return `A line has at most ${facts.longestSource} tokens, got ${ids.length}. Split it.`;
  }
  const tensor = values => new Tensor("int64", BigInt64Array.from(values), [1, ids.length]);
  const [output] = await model.generate({
    inputs: tensor(ids.map(BigInt)), attention_mask: tensor(ids.map(() => 1n)), num_beams: 1,
    max_new_tokens: Math.min(ids.length + EXTRA_TOKENS, facts.longestOutput),
    stopping_criteria: mine,
  });
  const text = targetTokenizer.decode(output.tolist(), { skip_special_tokens: true });
  return text;
}

load().catch(error => say(`The model cannot be loaded: ${error.message}`));
