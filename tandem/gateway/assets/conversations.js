// The conversations of this browser, in IndexedDB. They are never sent anywhere but to the model.

const STORE = "conversations";

/** A request of IndexedDB as a promise. */
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Where the browser keeps nothing (private windows of some), conversations last as long as the page. */
class Forgetful {
  constructor() { this.kept = new Map(); }
  async all() { return [...this.kept.values()]; }
  async put(conversation) { this.kept.set(conversation.id, conversation); }
  async remove(id) { this.kept.delete(id); }
}

class Kept {
  constructor(database) { this.database = database; }
  store(mode) { return this.database.transaction(STORE, mode).objectStore(STORE); }
  all() { return done(this.store("readonly").getAll()); }
  put(conversation) { return done(this.store("readwrite").put(conversation)); }
  remove(id) { return done(this.store("readwrite").delete(id)); }
}

/** Returns the store of conversations: `all()`, `put(conversation)`, `remove(id)`, and `isKept`, whether they outlive the page. */
export async function openConversations() {
  try {
    const request = indexedDB.open("tandem", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    return Object.assign(new Kept(await done(request)), { isKept: true });
  } catch {
    return Object.assign(new Forgetful(), { isKept: false });
  }
}

/** Returns a conversation without a message. A turn is `{role: "user", text}` or `{role: "assistant", answers}`, one answer for each model asked. */
export const newConversation = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "New conversation", updated: Date.now(), turns: [] });

/** Returns an answer that has not begun. */
export const newAnswer = (model) => (
  { model, text: "", reasoning: "", tokens: [], versions: [], finish: null, usage: null, error: "", isPlain: false, firstS: null, seconds: null }
);

/** Returns the messages that lead to the answer in `column` of the turn `end`, in the form of the API. */
export function messagesBefore(conversation, end, column) {
  return conversation.turns.slice(0, end).map((turn) => (
    turn.role === "user" ? { role: "user", content: turn.text } : { role: "assistant", content: (turn.answers[column] ?? turn.answers[0]).text }
  ));
}
