// What survives a reload. Every function works without storage, in which case nothing is kept.

const MAX_CONVERSATIONS = 100;
const MAX_CHARACTERS = 4_000_000; // of one conversation; browsers store about five million of a server
const PREFIX = 'secondguess-conversation-';

/** Return a stored value, or null. */
export function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Store a value; return false where the browser refuses it. */
export function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(key) {
  try {
    localStorage.removeItem(key);
  } catch { /* nothing is stored */ }
}

function isMessage(message) {
  if (message?.role === 'user') return typeof message.text === 'string' && Array.isArray(message.images);
  if (message?.role === 'tool') return typeof message.text === 'string' && typeof message.call?.id === 'string';
  return message?.role === 'assistant' && Array.isArray(message.parts) && message.parts.every(Array.isArray);
}

function isConversation(conversation) {
  return typeof conversation?.id === 'string' && Array.isArray(conversation.messages)
    && conversation.messages[0]?.role === 'user' && conversation.messages.every(isMessage);
}

/** Return the stored conversations, the newest first; what another version has stored is left out. */
export function readConversations() {
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch { /* storage is refused */ }
  return keys.map(read).filter(isConversation).sort((one, other) => other.changed - one.changed);
}

/** Store a conversation, if need be in place of the oldest others; return false if it has no room. */
export function writeConversation(conversation) {
  if (JSON.stringify(conversation).length > MAX_CHARACTERS) return false;
  const others = readConversations().filter(({ id }) => id !== conversation.id);
  for (const { id } of others.splice(MAX_CONVERSATIONS - 1)) removeConversation(id);
  while (!write(PREFIX + conversation.id, conversation)) {
    if (others.length === 0) return false;
    removeConversation(others.pop().id);
  }
  return true;
}

export function removeConversation(id) {
  remove(PREFIX + id);
}
