// Mode of chats: conversations, their messages and the box for the next one.

import { ReplyView, onCopyCode } from './markdown.js';
import { $, announce, copyWith, create, hideNotice, isNarrow, number, page, percent, rate, showNotice } from './page.js';
import { Tally, follow, keepingEnd, textOf } from './replies.js';
import { run, stop } from './server.js';
import { readConversations, removeConversation, writeConversation } from './storage.js';

const ENDINGS = {
  length: 'Cut off: max tokens reached.',
  context: 'Cut off: the context is full.',
  stopped: 'Stopped.',
  failed: 'Incomplete: the request failed.',
};
const CAN_GO_ON = ['length', 'stopped', 'failed'];

let conversations = readConversations();
let conversation = newConversation();
const views = new WeakMap(); // message -> the view of a reply
let shown = []; // views of the conversation
let images = []; // of the next message, as data: URLs

function newConversation() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, changed: Date.now(), messages: [] };
}

// --- Requests ---------------------------------------------------------------------------------------------------

/** Return the messages as those of a request. */
function toRequest(messages) {
  const system = $('system').value.trim() ? [{ role: 'system', content: $('system').value }] : [];
  return [...system, ...messages.map(toRequestMessage)];
}

function toRequestMessage(message) {
  if (message.role === 'tool') return { role: 'tool', tool_call_id: message.call.id, content: message.text };
  if (message.role === 'assistant') {
    const calls = callsOf(message).map(({ id, name, arguments: given }) => (
      { id, type: 'function', function: { name, arguments: given } }
    ));
    return { role: 'assistant', content: textOf(message.parts), ...(calls.length && { tool_calls: calls }) };
  }
  if (message.images.length === 0) return { role: 'user', content: message.text };
  const parts = message.images.map((url) => ({ type: 'image_url', image_url: { url } }));
  return { role: 'user', content: [...parts, { type: 'text', text: message.text }] };
}

/** Ask for a reply to messages; return false, with the conversation as it was, if none came. */
function ask(messages) {
  const reply = { role: 'assistant', parts: [], reasoning: '', calls: [], ending: null, stats: null };
  return receive(messages, reply, { messages: toRequest(messages) });
}

/** Ask for the rest of the last reply. */
function continueReply() {
  const reply = conversation.messages.at(-1);
  const messages = toRequest(conversation.messages);
  if (reply.reasoning) messages.at(-1).reasoning_content = reply.reasoning;
  const fields = { messages, continue_final_message: true, add_generation_prompt: false };
  return receive(conversation.messages.slice(0, -1), reply, fields);
}

async function receive(messages, reply, fields) {
  const target = conversation;
  const before = target.messages;
  const tally = new Tally();
  const { reasoning, ending } = reply;
  target.messages = [...messages, reply];
  keep(target);
  draw();
  drawList();
  scrollToEnd();
  focusBox();
  const view = views.get(reply);
  const article = $('messages').lastElementChild;
  await run(async (settings, signal) => {
    reply.ending = 'stopped';
    try {
      await follow('v1/chat/completions', { ...settings, ...fields }, signal, {
        tally,
        element: view.element,
        show: (segments) => view.add(segments),
        draw: () => {
          reply.reasoning = reasoning + tally.reasoning;
          reply.calls = tally.calls;
          keepingEnd($('messages'), () => showProgress(article, reply, tally));
        },
      });
      reply.ending = tally.ending;
    } catch (error) {
      if (!signal.aborted) reply.ending = 'failed';
      throw error;
    }
  });
  if (!tally.areCallsComplete) reply.calls = []; // an unfinished call cannot be answered
  const hasReplied = Boolean(tally.text || tally.reasoning || tally.stats);
  if (hasReplied) {
    reply.stats = joinedStats(reply.stats, statsOf(tally));
  } else {
    reply.ending = ending;
    target.messages = before;
  }
  keep(target);
  if (target === conversation) keepingEnd($('messages'), draw);
  drawList();
  return hasReplied;
}

function statsOf({ stats, numTokens }) {
  if (!stats) return null;
  return {
    numTokens,
    tokensPerSecond: stats.tokens_per_second,
    share: stats.num_accepted / stats.num_tokens,
    tokensPerPass: stats.acceptance_length,
  };
}

/** Return the statistics of a reply and of its continuation. */
function joinedStats(before, after) {
  if (!before || !after) return after;
  const parts = [before, after];
  const numTokens = before.numTokens + after.numTokens;
  const sum = (value) => parts.reduce((total, part) => total + value(part), 0);
  return {
    numTokens,
    tokensPerSecond: numTokens / sum((part) => part.numTokens / part.tokensPerSecond),
    share: sum((part) => part.share * part.numTokens) / numTokens,
    tokensPerPass: numTokens / sum((part) => part.numTokens / part.tokensPerPass),
  };
}

function showProgress(article, reply, tally) {
  const { reasoning } = reply;
  article.querySelector('.reasoning').hidden = !reasoning;
  article.querySelector('.reasoning p').textContent = reasoning;
  article.querySelector('.calls').replaceWith(callsElement(reply.calls));
  article.querySelector('.stats').textContent = tally.numCharacters
    ? `${rate(tally.charactersPerSecond)} characters/s`
    : 'Reading the prompt';
}

// --- Messages ---------------------------------------------------------------------------------------------------

/** Draw the conversation; replies that were drawn before keep their elements. */
function draw() {
  for (const view of shown) view.clearOrigins();
  shown = [];
  const text = 'Replies appear here. The whole conversation is sent with every message.';
  const hint = create('p', { className: 'hint', textContent: text });
  const articles = conversation.messages.map(articleOf);
  $('messages').replaceChildren(...(articles.length ? articles : [hint]));
  const [call] = openCalls();
  $('chat-label').textContent = $('chat-prompt').placeholder = call ? `Result of ${call.name}` : 'Message';
  for (const view of shown) view.refresh();
}

function scrollToEnd() {
  $('messages').scrollTop = $('messages').scrollHeight;
}

function articleOf(message, index) {
  const isReply = message.role === 'assistant';
  const article = create('article', { className: `message from-${message.role}` });
  article.dataset.index = index;
  const title = create('h2', { textContent: isReply ? 'Model' : message.call ? `Result of ${message.call.name}` : 'You' });
  article.append(title, ...(isReply ? replyContent(message) : saidContent(message)), footOf(message, index));
  return article;
}

function saidContent({ text, images: urls = [] }) {
  const pictures = urls.map((src) => create('img', { src, alt: 'Attached image' }));
  return [...pictures, create('div', { className: 'said', textContent: text })];
}

function replyContent(message) {
  if (!views.has(message)) views.set(message, new ReplyView($('messages'), message.parts));
  const view = views.get(message);
  shown.push(view);
  const reasoning = create('details', { className: 'reasoning', hidden: !message.reasoning });
  reasoning.append(create('summary', { textContent: 'Reasoning' }), create('p', { textContent: message.reasoning }));
  return [reasoning, view.element, callsElement(callsOf(message))];
}

/** Return the calls of a reply; there are none in one that an earlier version has stored, and in no reply. */
const callsOf = (reply) => reply?.calls ?? [];

const textOfCalls = (calls) => calls.map(({ name, arguments: given }) => `${name}(${given})`).join('\n');

function callsElement(calls) {
  const text = create('pre', { textContent: textOfCalls(calls), tabIndex: 0 });
  const head = create('div', { className: 'code-head', textContent: 'Calls of tools' });
  return create('div', { className: 'code calls', hidden: calls.length === 0 }, head, text);
}

/** Return the calls of the last reply that have no result yet. */
function openCalls() {
  const { messages } = conversation;
  const last = messages.findLastIndex(({ role }) => role === 'assistant');
  const results = messages.slice(last + 1);
  return results.every(({ role }) => role === 'tool') ? callsOf(messages[last]).slice(results.length) : [];
}

/** Return the line below a message: its end, its statistics, and what can be done with it. */
function footOf(message, index) {
  const isLast = index === conversation.messages.length - 1;
  const isReply = message.role === 'assistant';
  const foot = create('footer', {}, actionButton('Copy'));
  if (!isReply) {
    foot.append(actionButton('Edit'));
    return foot;
  }
  if (isLast) foot.append(actionButton('Regenerate'));
  foot.append(create('span', { className: 'stats', textContent: describe(message.stats) }));
  if (message.ending in ENDINGS) {
    const ending = create('p', { className: 'ending' }, ENDINGS[message.ending]);
    if (isLast && CAN_GO_ON.includes(message.ending) && textOf(message.parts)) ending.append(' ', actionButton('Continue', ''));
    foot.prepend(ending);
  }
  return foot;
}

function actionButton(name, className = 'quiet') {
  const button = create('button', { type: 'button', className, textContent: name });
  button.dataset.action = name.toLowerCase();
  return button;
}

function describe(stats) {
  if (!stats) return '';
  const { numTokens, tokensPerSecond, share, tokensPerPass } = stats;
  const speed = `${number(numTokens)} tokens, ${rate(tokensPerSecond)} tokens/s`;
  return `${speed}, ${percent(share)} drafted, ${number(tokensPerPass, 2)} tokens per pass`;
}

const actions = {
  copy: (index, button) => {
    const message = conversation.messages[index];
    copyWith(button, message.text ?? (textOf(message.parts) || textOfCalls(callsOf(message))));
  },
  edit: (index) => edit(index),
  regenerate: (index) => ask(conversation.messages.slice(0, index)),
  continue: () => continueReply(),
};

function onAction({ target }) {
  const { action } = target.dataset;
  if (!action || (page.running && action !== 'copy')) return;
  actions[action](Number(target.closest('article').dataset.index), target);
}

/** Show a message in a box; what follows the message is replaced when it is sent. */
function edit(index) {
  const message = conversation.messages[index];
  const article = $('messages').children[index];
  const box = create('textarea', { className: 'prompt', value: message.text, rows: 3, ariaLabel: 'Message' });
  const send = () => {
    if (page.running || !box.value.trim()) return;
    ask([...conversation.messages.slice(0, index), { ...message, text: box.value }]);
  };
  const cancel = () => { draw(); focusBox(); };
  const sendButton = create('button', { type: 'button', className: 'primary', textContent: 'Send', onclick: send });
  const cancelButton = create('button', { type: 'button', textContent: 'Cancel', onclick: cancel });
  box.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !event.isComposing) cancel();
    else sendOnEnter(event, send);
  });
  article.querySelector('.said').replaceWith(box);
  article.querySelector('footer').replaceChildren(sendButton, cancelButton);
  box.focus();
}

/** Send with Enter. Shift+Enter is a line break, and Enter that chooses a word of an input method is none of ours. */
function sendOnEnter(event, send) {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  event.stopPropagation();
  send();
}

/** Send the text in the box, a message or the result of a call; it returns there if no reply comes. */
export async function sendMessage() {
  const text = $('chat-prompt').value;
  const [call, ...others] = openCalls();
  const sent = call ? { role: 'tool', text, call } : { role: 'user', text, images };
  if (page.running) return;
  if (!text.trim() && images.length === 0) {
    $('chat-prompt').focus();
    return showNotice('empty', 'Enter some text first.');
  }
  const target = conversation;
  $('chat-prompt').value = '';
  if (others.length) {
    conversation.messages = [...conversation.messages, sent];
    keep(conversation);
    draw();
    return scrollToEnd();
  }
  showImages([]);
  const isAnswered = await ask([...conversation.messages, sent]);
  if (isAnswered || target !== conversation || $('chat-prompt').value || images.length) return;
  $('chat-prompt').value = text;
  showImages(sent.images ?? []);
}

// --- Conversations ----------------------------------------------------------------------------------------------

/** Keep a conversation for the next visit; without messages there is nothing to keep. */
function keep(target) {
  if (target.isDiscarded) return;
  target.changed = Date.now();
  conversations = conversations.filter(({ id }) => id !== target.id);
  if (target.messages.length === 0) {
    removeConversation(target.id);
    return;
  }
  conversations.unshift(target);
  if (!writeConversation(target)) {
    showNotice('storage', 'The browser has no room for this conversation: it is lost when the page is closed. Delete others.');
  }
}

const titleOf = ({ messages: [first] }) => first.text.trim() || 'Image';

function drawList() {
  $('conversation-list').replaceChildren(...conversations.map((each) => {
    const title = titleOf(each);
    const open = create('button', { type: 'button', className: 'title', textContent: title, title, onclick: () => select(each) });
    if (each === conversation) open.setAttribute('aria-current', 'true');
    const discard = create('button', { type: 'button', className: 'quiet', textContent: '×' });
    discard.addEventListener('click', () => discardConversation(each));
    discard.ariaLabel = `Delete conversation: ${title}`;
    return create('li', {}, open, discard);
  }));
}

function select(chosen) {
  stop();
  hideNotice();
  conversation = chosen;
  draw();
  drawList();
  scrollToEnd();
  if (isNarrow('64rem')) $('conversations').open = false;
  focusBox();
}

/** Focus the box of the next message, except on phones, where this shows the keyboard. */
function focusBox() {
  if (page.mode === 'chat' && !isNarrow('54rem')) $('chat-prompt').focus();
}

function discardConversation(chosen) {
  if (!confirm(`Delete this conversation?\n\n${titleOf(chosen).slice(0, 200)}`)) return;
  chosen.isDiscarded = true; // also while a reply to it arrives
  removeConversation(chosen.id);
  conversations = conversations.filter((each) => each !== chosen);
  if (chosen === conversation) select(newConversation());
  else drawList();
  announce('Conversation deleted.');
}

// --- Images -----------------------------------------------------------------------------------------------------

function readImage(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Attach the images among files, where the model takes images. */
async function attach(files) {
  if (!page.model?.takes_images) return;
  const chosen = [...files].filter(({ type }) => $('image-files').accept.split(',').includes(type));
  try {
    showImages([...images, ...await Promise.all(chosen.map(readImage))]);
  } catch (error) {
    showNotice('failed', `The image cannot be read: ${error.message}`);
  }
}

function showImages(urls) {
  images = urls;
  $('images').hidden = urls.length === 0;
  $('images').replaceChildren(...urls.map((src, index) => {
    const removed = () => showImages(urls.filter((_, other) => other !== index));
    const button = create('button', { type: 'button', className: 'quiet', textContent: '×', onclick: removed });
    button.ariaLabel = `Remove image ${index + 1}`;
    return create('li', {}, create('img', { src, alt: `Image ${index + 1} to send` }), button);
  }));
}

function startImages() {
  document.addEventListener('model', () => { $('attach').hidden = !page.model.takes_images; });
  $('attach').addEventListener('click', () => $('image-files').click());
  $('image-files').addEventListener('change', async () => {
    await attach($('image-files').files);
    $('image-files').value = '';
  });
  $('chat-prompt').addEventListener('paste', ({ clipboardData }) => attach(clipboardData.files));
  $('chat').addEventListener('dragover', (event) => event.preventDefault());
  $('chat').addEventListener('drop', (event) => {
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}

export function startChat() {
  startImages();
  $('chat-prompt').addEventListener('keydown', (event) => sendOnEnter(event, sendMessage));
  $('messages').addEventListener('click', onAction);
  $('messages').addEventListener('click', onCopyCode);
  $('new-chat').addEventListener('click', () => select(newConversation()));
  for (const id of ['colours', 'ghosts']) {
    $(id).addEventListener('change', () => { for (const view of shown) view.refresh(); });
  }
  // After an answer with the key, or of a server that is back, Markdown can be rendered that could not be before.
  document.addEventListener('model', () => { for (const view of shown) view.refresh(); });
  addEventListener('pagehide', () => { if (page.running && conversation.messages.length) keep(conversation); });
  if (isNarrow('64rem')) $('conversations').open = false;
  select(conversations[0] ?? conversation);
}
