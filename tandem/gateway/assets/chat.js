// The chat page: conversations, what is said in them, and the requests that answer it.

import { answers, listModels } from "./api.js";
import { messagesBefore, newAnswer, newConversation, openConversations } from "./conversations.js";
import { announce, applyTheme, button, byId, make } from "./dom.js";
import { AnswerView, userTurn } from "./messages.js";
import { change, connectForm, sampling, settings, takeKey } from "./settings.js";

const KEEP_EVERY_MS = 1000;
const LONGEST_TITLE = 60;

let store;
let conversations = [];
let current;
let models = [];
/** The requests in flight by conversation: its AbortController. One that is not on the screen goes on. */
const running = new Map();

// Conversations

async function keep(conversation) {
  conversation.updated = Date.now();
  if (!conversations.includes(conversation)) conversations.push(conversation);
  await store.put(conversation);
}

function show(conversation) {
  current = conversation;
  drawList();
  drawTurns();
  drawState();
  byId("prompt").focus();
}

async function forget(conversation) {
  if (!window.confirm(`Delete the conversation "${conversation.title}"?`)) return;
  running.get(conversation.id)?.abort();
  conversations = conversations.filter((each) => each !== conversation);
  await store.remove(conversation.id);
  if (conversation === current) show(newConversation());
  else drawList();
}

function drawList() {
  conversations.sort((one, other) => other.updated - one.updated);
  byId("conversations").replaceChildren(...conversations.map((each) => make("li", { className: each === current ? "current" : "" },
    button(each.title, () => { byId("side").classList.remove("open"); show(each); }, { className: "open", aria: each === current ? { current: "page" } : {} }),
    button("×", () => forget(each), { className: "remove", title: "Delete", aria: { label: `Delete ${each.title}` } }))));
}

// Turns

/** Shows the whole conversation. */
function drawTurns() {
  const log = byId("log");
  log.replaceChildren(...current.turns.map((turn, number) => {
    if (turn.role === "user") return userTurn(turn, (text) => say(text, number));
    const shown = turn.answers.map((answer) => viewOf(answer, number).element);
    const kind = shown.length > 1 ? "turn assistant compared" : "turn assistant";
    return make("article", { className: kind, aria: { label: "Answers" } }, ...shown);
  }));
  byId("welcome").hidden = current.turns.length > 0;
  document.title = current.turns.length ? `${current.title} · Tandem` : "Tandem";
  toEnd();
}

/** The views of answers, which are drawn once and stay while turns come after them. */
const views = new WeakMap();

function viewOf(answer, number) {
  const known = views.get(answer);
  if (known) return known;
  const view = new AnswerView(answer, () => reply(number));
  views.set(answer, view);
  view.draw(answer, answer.finish === null && running.has(current.id));
  return view;
}

const isAtEnd = () => { const { scrollTop, scrollHeight, clientHeight } = byId("scroller"); return scrollHeight - scrollTop - clientHeight < 80; };
const toEnd = () => { byId("scroller").scrollTop = byId("scroller").scrollHeight; };

/** Says `text` as the user's turn `number`, in the place of what was there and all that came after. */
async function say(text, number = current.turns.length) {
  running.get(current.id)?.abort();
  current.turns.splice(number, Infinity, { role: "user", text });
  if (number === 0) current.title = text.trim().replace(/\s+/g, " ").slice(0, LONGEST_TITLE);
  await reply(number + 1);
}

/** Asks the chosen models for the turn `number` of the current conversation, in the place of what was there and all that came after. */
async function reply(number) {
  const conversation = current;
  const asked = settings.compares ? [settings.model, settings.other] : [settings.model];
  if (!settings.model) {
    notice("No model is served yet, or the key is missing: see the settings.", true);
    return;
  }
  running.get(conversation.id)?.abort();
  const stop = new AbortController();
  const turn = { role: "assistant", answers: asked.map(newAnswer) };
  conversation.turns.splice(number, Infinity, turn);
  running.set(conversation.id, stop);
  drawTurns();
  drawState();
  announce("The model answers.");
  await keep(conversation);
  drawList();
  const kept = setInterval(() => store.put(conversation), KEEP_EVERY_MS);
  await Promise.all(turn.answers.map((answer, column) => receive(answer, messagesBefore(conversation, number, column), stop.signal, () => {
    if (conversation !== current || !conversation.turns.includes(turn)) return;
    const follows = isAtEnd();
    views.get(answer)?.drawSoon(answer);
    if (follows) requestAnimationFrame(toEnd);
  })));
  clearInterval(kept);
  if (running.get(conversation.id) !== stop) return;  // Another answer has taken its place.
  running.delete(conversation.id);
  if (conversations.includes(conversation)) await keep(conversation);
  const follows = isAtEnd();
  // Also where another conversation is on the screen: this one is looked at later.
  await Promise.all(turn.answers.map((answer) => views.get(answer)?.draw(answer, false)));
  if (conversation !== current) return;
  if (follows) toEnd();
  drawState();
  announce(turn.answers.some((answer) => answer.error) ? "The answer has an error." : "The answer is complete.");
}

/** Receives one answer; `changed` is called after every part. Whatever happens is noted in the answer. */
async function receive(answer, messages, signal, changed) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  const request = { model: answer.model, messages, system: settings.system, sampling: sampling(), probabilities: settings.probabilities };
  try {
    for await (const part of answers(request, { key: settings.key, signal, format: settings.format })) {
      if (part.isPlain) { answer.isPlain = settings.format === "auto"; continue; }
      if ((part.text || part.reasoning) && answer.firstS === null) answer.firstS = seconds();
      answer.text += part.text;
      answer.reasoning += part.reasoning;
      answer.tokens.push(...part.tokens);
      answer.versions = part.versions.length ? part.versions : answer.versions;
      answer.finish = part.finish ?? answer.finish;
      answer.usage = part.usage ?? answer.usage;
      changed();
    }
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.error = error instanceof Error ? error.message : String(error);
  }
  answer.finish ??= "stop";
  answer.seconds = seconds();
  changed();
}

// Models and the state of the page

async function loadModels() {
  try {
    models = await listModels(settings.key);
    notice(models.length ? "" : "No backend has said which models it serves yet.", true);
  } catch (error) {
    models = [];
    notice(error.status === 401 || error.status === 403 ? `${error.message} (Settings: API key)` : error.message, true);
  }
  const choices = models.flatMap(choicesOf);
  for (const name of ["model", "other"]) {
    // If a version is no longer served, its model is selected.
    const kept = [settings[name], settings[name].split("@")[0]].find((value) => choices.some((choice) => choice.value === value));
    const chosen = kept ?? (choices[name === "other" && choices.length > 1 ? 1 : 0]?.value ?? "");
    byId(name).replaceChildren(...choices.map(({ value, text }) => make("option", { value, selected: value === chosen }, text)));
    if (models.length) change({ [name]: chosen });
  }
}

/** Returns what can be asked for: a model with whichever weights, and, while backends have several versions of them, each version alone. */
function choicesOf({ id, versions }) {
  const all = { value: id, text: versions.length ? `${id} (weights ${versions.join(", ")})` : id };
  return versions.length > 1 ? [all, ...versions.map((version) => ({ value: `${id}@${version}`, text: `${id}, weights ${version} alone` }))] : [all];
}

function notice(text, isBad = false) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
  byId("notice").classList.toggle("bad", isBad);
}

function drawState() {
  const runs = running.has(current.id);
  byId("stop").hidden = !runs;
  byId("send").hidden = runs;
  byId("other-label").hidden = !settings.compares;
  byId("compare").setAttribute("aria-pressed", String(settings.compares));
}

function submit(event) {
  event?.preventDefault();
  const field = byId("prompt");
  if (!field.value.trim() || running.has(current.id)) return;
  const text = field.value;
  field.value = "";
  grow();
  say(text);
}

/** Makes the field as high as its text, up to a limit of the style. */
function grow() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function onKey(event) {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    byId("side").classList.remove("open");
    running.get(current.id)?.abort();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    show(newConversation());
  } else if (event.key === "/" && !isTyping && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    byId("prompt").focus();
  } else if (event.key === "ArrowUp" && event.target === byId("prompt") && !byId("prompt").value) {
    [...document.querySelectorAll(".turn.user .edit")].at(-1)?.click();
    event.preventDefault();
  }
}

function connect() {
  byId("composer").addEventListener("submit", submit);
  byId("prompt").addEventListener("input", grow);
  byId("prompt").addEventListener("keydown", (event) => {
    // While a character is composed, Enter chooses it.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  byId("stop").addEventListener("click", () => { running.get(current.id)?.abort(); byId("prompt").focus(); });
  byId("new").addEventListener("click", () => { byId("side").classList.remove("open"); show(newConversation()); });
  byId("menu").addEventListener("click", () => byId("side").classList.toggle("open"));
  byId("compare").addEventListener("click", () => { change({ compares: !settings.compares }); drawState(); });
  for (const name of ["model", "other"]) byId(name).addEventListener("change", (event) => change({ [name]: event.target.value }));
  byId("open-settings").addEventListener("click", () => byId("settings").showModal());
  byId("settings").addEventListener("close", loadModels);
  connectForm(byId("settings-form"), () => {});
  document.addEventListener("keydown", onKey);
}

async function start() {
  takeKey();
  applyTheme(settings.theme);
  store = await openConversations();
  conversations = await store.all();
  for (const turn of conversations.flatMap((conversation) => conversation.turns)) {
    for (const answer of turn.answers ?? []) answer.finish ??= "interrupted";
  }
  connect();
  show(newConversation());
  await loadModels();
  if (!store.isKept) notice("This browser keeps nothing for this page: conversations end with it.");
  document.body.dataset.ready = "true";
}

start();
