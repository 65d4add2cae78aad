// Playground of the secondguess server. Text from the server and the user is only ever inserted with textContent.
'use strict';

const POLL_MS = 5000;
const POLL_WITHOUT_SERVER_MS = 2000;
const MAX_ATTEMPTS = 6; // requests that the server refused because it is busy
const FINISHED = { stop: 'an end token or a stop string', length: 'max tokens reached', context: 'context full' };
const HINTS = {
  gone: 'The server does not answer. The page tries again every two seconds; nothing that you have typed is lost.',
  draining: 'The server is shutting down: it finishes the requests that it has and accepts no others.',
  locked: 'The server needs an API key. Enter it in the settings.',
};

const page = { mode: 'completion', server: 'unknown', model: null, running: null, notice: null, messages: [] };
const $ = (id) => document.getElementById(id);
const modes = { completion: complete, chat, race };

// --- Requests ---------------------------------------------------------------------------------------------------

/** Request that did not give a complete reply. `kind`: gone, busy, draining, locked, refused, failed or cut. */
class Failure extends Error {
  constructor(kind, message, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

function headers() {
  const key = $('key').value.trim();
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) };
}

/** fetch, whose network errors become a Failure. */
async function request(path, options) {
  try {
    return await fetch(path, { cache: 'no-store', ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure('gone', HINTS.gone);
  }
}

async function failureOf(response) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  const message = error.message ?? `The server replied ${response.status} ${response.statusText}.`;
  const retryAfter = Number(response.headers.get('Retry-After')) || 1;
  if (response.status === 429) return new Failure('busy', message, retryAfter);
  if (response.status === 401 || response.status === 403) return new Failure('locked', HINTS.locked);
  if (response.status === 503 && error.code === 'draining') return new Failure('draining', HINTS.draining);
  return new Failure(response.status < 500 ? 'refused' : 'failed', message);
}

/** Yield the data of each server-sent event. */
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split('\n');
    held = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ''))) {
      if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
      if (line === '' && data.length) {
        yield data.join('\n');
        data = [];
      }
    }
  }
}

/** Yield the chunks of one streamed reply; `onSend` is called immediately before the request is sent. */
async function* chunksOf(path, body, signal, onSend) {
  onSend();
  const options = { method: 'POST', headers: headers(), body: JSON.stringify(body), signal };
  const response = await request(path, options);
  if (!response.ok) throw await failureOf(response);
  try {
    for await (const data of serverSentEvents(response.body)) {
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.code === 'draining' ? 'draining' : 'failed', chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
  }
  throw new Failure('cut', 'The connection ended before the reply was complete. The text so far is kept.');
}

/** As chunksOf; while the server is busy, wait as long as it says and try again. */
async function* stream(path, body, signal, onSend = () => {}) {
  for (let attempt = 1; ; attempt += 1) {
    try {
      return yield* chunksOf(path, body, signal, onSend);
    } catch (error) {
      if (error.kind !== 'busy' || attempt === MAX_ATTEMPTS) throw error;
      showServer('busy', 'Busy');
      for (let left = Math.ceil(error.retryAfter); left > 0; left -= 1) {
        showNotice('busy', `The server is busy. Trying again in ${left} s; Esc cancels.`);
        await sleep(1000, signal);
      }
      hideNotice('busy');
    }
  }
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => { clearTimeout(timer); reject(signal.reason); };
    const timer = setTimeout(() => { signal.removeEventListener('abort', stop); resolve(); }, milliseconds);
    signal.addEventListener('abort', stop, { once: true });
    if (signal.aborted) stop();
  });
}

/** Return the settings as fields of a request, or null after an invalid one has been shown. */
function readSettings() {
  if (!$('settings-form').checkValidity()) {
    $('settings').open = true;
    $('settings-form').reportValidity();
    return null;
  }
  const fields = {
    model: page.model,
    stream: true,
    stream_options: { include_usage: true },
    report: true,
    temperature: Number($('temperature').value),
    top_p: Number($('top-p').value),
    max_tokens: Number($('max-tokens').value),
    speculation: $('speculation').value,
  };
  if (fields.speculation === 'bounded') fields.speculation = { max_draft: Number($('max-draft').value || 4) };
  if ($('seed').value) fields.seed = Number($('seed').value);
  const stop = $('stop').value.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));
  if (stop.length) fields.stop = stop;
  return fields;
}

// --- Text and measurements --------------------------------------------------------------------------------------

/**
 * Return the segments [text, kind] of a chunk; kind is empty where the server does not report it.
 *
 * Rejected draft tokens stand before the token that was sampled in their place, the last of the chunk.
 */
function segmentsOf(chunk) {
  return chunk.choices.flatMap((choice) => {
    const text = choice.text ?? choice.delta?.content ?? choice.delta?.reasoning_content ?? '';
    if (!choice.secondguess) return text ? [[text, '']] : [];
    const { segments, rejected } = choice.secondguess;
    const kinds = segments.map(([part, drafted]) => [part, drafted ? 'drafted' : 'sampled']);
    if (rejected) kinds.splice(kinds.at(-1)?.[1] === 'sampled' ? -1 : kinds.length, 0, [rejected, 'rejected']);
    return kinds;
  });
}

/** Element that text is appended to; it scrolls along while its end is in view. */
class TextView {
  constructor(element, scroller = element) {
    this.element = element;
    this.scroller = scroller;
  }

  clear(given = '') {
    this.element.replaceChildren();
    if (given) this.append(given, 'given');
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  append(text, kind) {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    // A ghost is no part of the text: its line breaks are signs, and it is neither read out nor copied.
    const isGhost = kind === 'rejected';
    const span = document.createElement(isGhost ? 'del' : 'span');
    span.className = kind;
    span.textContent = isGhost ? text.replaceAll('\n', '⏎') : text;
    span.ariaHidden = isGhost || null;
    this.element.append(span);
    if (scrollHeight - scrollTop - clientHeight < 40) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  add(segments) {
    for (const [text, kind] of segments) this.append(text, kind);
  }
}

/** Counts of one reply: characters as they arrive, and the server's statistics at the end. */
class Tally {
  constructor() {
    this.text = '';
    this.numDrafted = 0;
    this.isOriginKnown = false;
    this.stats = null;
    this.numTokens = null;
    this.begin();
  }

  begin() {
    this.start = performance.now();
    this.seconds = 0;
  }

  add(chunk) {
    const segments = segmentsOf(chunk);
    for (const [text, kind] of segments) {
      if (kind === 'rejected') continue;
      this.text += text;
      this.isOriginKnown ||= kind !== '';
      if (kind === 'drafted') this.numDrafted += text.length;
    }
    if (segments.length) this.seconds = (performance.now() - this.start) / 1000;
    this.numTokens = chunk.usage?.completion_tokens ?? this.numTokens;
    this.stats = chunk.secondguess?.samples?.[0] ?? this.stats;
    return segments;
  }
}

const number = (value, digits = 0) => value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) => `${number(100 * share)} %`;
const rate = (value) => number(value, value < 10 ? 1 : 0);

function showGauge(name, value, unit) {
  $(`gauge-${name}`).textContent = value;
  $(`gauge-${name}-unit`).textContent = unit;
}

function showGauges(tally) {
  const { stats, text, numDrafted } = tally;
  const seconds = (performance.now() - tally.start) / 1000;
  const share = stats ? stats.num_accepted / stats.num_tokens : numDrafted / text.length;
  const isShareKnown = Number.isFinite(share) && (stats || tally.isOriginKnown);
  showGauge('share', isShareKnown ? percent(share) : '', stats ? `of ${number(stats.num_tokens)} tokens` : 'of the text');
  if (!stats) {
    showGauge('speed', text && rate(text.length / seconds), text ? 'characters/s' : 'tokens/s');
    showGauge('pass', '', 'mean draft length');
    showGauge('acceptance', '', 'of drafted tokens');
  } else {
    showGauge('speed', rate(stats.tokens_per_second), 'tokens/s');
    showGauge('pass', number(stats.acceptance_length, 2), `mean draft length ${number(stats.num_drafted / stats.num_rounds, 1)}`);
    const accepted = stats.acceptance_rate === null ? '' : percent(stats.acceptance_rate);
    const unit = stats.num_drafted ? `${number(stats.num_accepted)} of ${number(stats.num_drafted)} drafted` : 'nothing drafted';
    showGauge('acceptance', accepted, unit);
  }
  showPositions(stats);
}

/** Show the share of drafts accepted at each position, of the drafts that reached it. */
function showPositions(stats) {
  const drafted = stats?.drafted_per_position ?? [];
  $('positions').hidden = drafted.length === 0 || page.mode === 'race';
  $('positions-bars').replaceChildren(...drafted.map((count, place) => {
    const share = (stats.accepted_per_position[place] ?? 0) / count;
    const bar = document.createElement('div');
    bar.className = 'bar';
    bar.append(document.createElement('i'));
    bar.firstChild.style.setProperty('--share', share);
    const item = document.createElement('li');
    item.title = `position ${place + 1}: ${stats.accepted_per_position[place] ?? 0} of ${count} accepted`;
    const position = document.createElement('b');
    position.textContent = place + 1;
    item.append(bar, position, percent(share));
    return item;
  }));
}

/** Call `draw` once per frame until the returned function is called, which draws a last time. */
function everyFrame(draw) {
  let frame = requestAnimationFrame(function next() {
    draw();
    frame = requestAnimationFrame(next);
  });
  return () => { cancelAnimationFrame(frame); draw(); };
}

// --- Modes ------------------------------------------------------------------------------------------------------

/** Show a reply in a view and in the gauges as it arrives; return its tally, also through `tally` if it fails. */
async function follow(path, body, view, signal, tally = new Tally()) {
  const finish = everyFrame(() => showGauges(tally));
  view.element.classList.add('running');
  try {
    for await (const chunk of stream(path, body, signal, () => tally.begin())) view.add(tally.add(chunk));
    const ending = FINISHED[tally.stats?.finish_reason] ?? 'finished';
    announce(`Finished: ${tally.numTokens} tokens, ${ending}.`);
  } finally {
    view.element.classList.remove('running');
    finish();
  }
  return tally;
}

async function complete(prompt, settings, signal) {
  const view = new TextView($('completion-output'));
  view.clear(prompt);
  await follow('v1/completions', { ...settings, prompt }, view, signal);
}

function addMessage(role, className) {
  const message = document.createElement('article');
  const title = document.createElement('h3');
  const body = document.createElement('div');
  message.className = 'message';
  title.textContent = role;
  body.className = className;
  message.append(title, body);
  if (page.messages.length === 0) $('messages').querySelector('.hint')?.remove();
  $('messages').append(message);
  return { message, view: new TextView(body, $('messages')) };
}

async function chat(prompt, settings, signal) {
  const asked = addMessage('You', 'said');
  asked.view.append(prompt, '');
  const answered = addMessage('Model', 'reply');
  $('messages').scrollTop = $('messages').scrollHeight;
  $('chat-prompt').value = '';
  const before = page.messages;
  const messages = [...before, { role: 'user', content: prompt }];
  const tally = new Tally();
  try {
    await follow('v1/chat/completions', { ...settings, messages }, answered.view, signal, tally);
  } finally {
    if (page.messages !== before) { // a new conversation has begun
    } else if (tally.text || tally.stats) {
      page.messages = [...messages, { role: 'assistant', content: tally.text }];
    } else { // no reply: the message returns to the box
      asked.message.remove();
      answered.message.remove();
      $('chat-prompt').value ||= prompt;
    }
  }
}

function startConversation() {
  page.running?.abort();
  page.messages = [];
  $('messages').replaceChildren();
  $('chat-prompt').focus();
}

/** One side of a race: text with the times of its parts, shown live or again. */
class Lane {
  constructor(id, prompt) {
    this.view = new TextView($(id).querySelector('.output'));
    this.pace = $(id).querySelector('.pace');
    this.detail = $(id).querySelector('.detail');
    this.bar = $(id).querySelector('progress');
    this.tally = new Tally();
    this.parts = [];
    this.prompt = prompt;
    this.clear();
  }

  clear() {
    this.view.clear(this.prompt);
    this.pace.textContent = '–';
    this.detail.textContent = '';
    this.bar.value = 0;
    this.numShown = 0;
  }

  show(segments, goal) {
    this.view.add(segments);
    for (const [text, kind] of segments) this.numShown += kind === 'rejected' ? 0 : text.length;
    this.bar.value = goal ? this.numShown / goal : 0;
  }

  showPace(start) {
    this.pace.textContent = `${number((performance.now() - start) / 1000, 1)} s`;
  }

  get tokensPerSecond() {
    return this.tally.numTokens / this.tally.seconds;
  }

  showResult() {
    const { stats, seconds, numTokens } = this.tally;
    const accepted = stats?.num_drafted ? `${percent(stats.acceptance_rate)} of drafts accepted` : 'nothing drafted';
    this.pace.textContent = `${number(seconds, 2)} s`;
    this.detail.textContent = `${number(numTokens)} tokens, ${rate(this.tokensPerSecond)} tokens/s, ${accepted}`;
    this.bar.value = 1;
  }

  /** Send the request, and show and record the reply; `goal` is the length at which the bar is full. */
  async record(body, signal, goal) {
    const finish = everyFrame(() => this.showPace(this.tally.start));
    this.view.element.classList.add('running');
    try {
      for await (const chunk of stream('v1/completions', body, signal, () => this.tally.begin())) {
        const segments = this.tally.add(chunk);
        this.parts.push({ segments, at: this.tally.seconds });
        this.show(segments, goal);
      }
    } finally {
      this.view.element.classList.remove('running');
      finish();
    }
    this.showResult();
  }

  /** Show the recorded reply again, at the times at which it came. */
  async replay(signal) {
    this.clear();
    const start = performance.now();
    const finish = everyFrame(() => this.showPace(start));
    try {
      for (const { segments, at } of this.parts) {
        const wait = 1000 * at - (performance.now() - start);
        if (wait > 0) await sleep(wait, signal);
        this.show(segments, this.tally.text.length);
      }
    } finally {
      finish();
    }
    this.showResult();
  }
}

async function race(prompt, settings, signal) {
  const body = { ...settings, prompt };
  if (body.temperature > 0) body.seed ??= Math.floor(Math.random() * 2 ** 32);
  const plain = { ...body, speculation: 'off' };
  const speculative = { ...body, speculation: body.speculation === 'off' ? 'auto' : body.speculation };
  const lanes = [new Lane('lane-plain', prompt), new Lane('lane-speculative', prompt)];
  try {
    showVerdict('Warming up, so that both runs find the prompt in the cache.');
    for await (const _ of stream('v1/completions', { ...plain, max_tokens: 1 }, signal)) { /* only for the cache */ }
    showVerdict('Plain decoding runs alone.');
    await lanes[0].record(plain, signal);
    showVerdict('Speculative decoding runs alone. The plain run is replayed beside it at the speed it had.');
    await Promise.all([lanes[0].replay(signal), lanes[1].record(speculative, signal, lanes[0].tally.text.length)]);
  } catch (error) {
    showVerdict('The race was not finished.');
    throw error;
  }
  showVerdict(comparison(...lanes), true);
}

function comparison(plain, speculative) {
  const ratio = speculative.tokensPerSecond / plain.tokensPerSecond;
  const numTokens = `${number(plain.tally.numTokens)} tokens`;
  const [before, after] = [plain, speculative].map((lane) => `${number(lane.tally.seconds, 2)} s`);
  if (!Number.isFinite(ratio)) return 'Nothing to compare: the model ended the text at once.';
  if (plain.tally.text === speculative.tally.text) {
    return `Speculative decoding had ${number(ratio, 2)}× the speed of plain decoding: ${after} instead of ${before} for the same ${numTokens}.`;
  }
  return `Speculative decoding had ${number(ratio, 2)}× the speed of plain decoding, in tokens per second. The two texts differ.`;
}

function showVerdict(text, isDone = false) {
  $('verdict').textContent = text;
  $('verdict').toggleAttribute('data-done', isDone);
  announce(text);
}

// --- State of the page ------------------------------------------------------------------------------------------

async function run() {
  const field = $(`${page.mode}-prompt`);
  if (page.running) return;
  hideNotice();
  if (!field.value) {
    field.focus();
    return showNotice('empty', 'Enter some text first.');
  }
  const controller = new AbortController();
  page.running = controller;
  showRunning(true);
  try {
    if (!page.model) await loadModel();
    const settings = readSettings();
    if (settings) await modes[page.mode](field.value, settings, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) announce('Stopped. The text so far is kept.');
    else showFailure(error);
    hideNotice('busy');
  } finally {
    page.running = null;
    showRunning(false);
    checkServer();
  }
}

function stop() {
  page.running?.abort();
}

function showRunning(isRunning) {
  for (const button of document.querySelectorAll('[data-run]')) button.setAttribute('aria-disabled', isRunning);
  for (const button of document.querySelectorAll('[data-stop]')) button.hidden = !isRunning;
  if (isRunning) announce('Generating.');
}

function showFailure(error) {
  if (!(error instanceof Failure)) console.error(error);
  page.model = null; // the server's model or keys may have changed: both are asked for again
  showNotice(error.kind ?? 'failed', error.message);
  if (error.kind === 'gone' || error.kind === 'draining') showServer(error.kind);
  if (error.kind === 'locked') askForKey();
}

function askForKey() {
  showServer('locked');
  $('settings').open = true;
}

function showNotice(kind, text) {
  page.notice = kind;
  $('notice').hidden = false;
  $('notice').dataset.kind = ['busy', 'draining', 'empty'].includes(kind) ? 'wait' : 'bad';
  if ($('notice').textContent !== text) $('notice').textContent = text;
}

/** Hide the notice, or only a notice of this kind. */
function hideNotice(kind = page.notice) {
  if (page.notice !== kind) return;
  page.notice = null;
  $('notice').hidden = true;
  $('notice').textContent = '';
}

function announce(text) {
  $('status').textContent = text;
}

const SERVER_TEXTS = { ready: 'Ready', gone: 'No answer', draining: 'Shutting down', locked: 'API key needed' };

function showServer(state, text = SERVER_TEXTS[state]) {
  page.server = state;
  $('server').dataset.state = state;
  if ($('server-text').textContent !== text) $('server-text').textContent = text;
}

async function loadModel() {
  const response = await request('v1/models', { headers: headers() });
  if (!response.ok) throw await failureOf(response);
  const [model] = (await response.json()).data;
  page.model = model.id;
  $('model').textContent = model.max_model_len ? `${model.id}, context ${number(model.max_model_len)}` : model.id;
}

/** Return the load of the server in words, from its metrics. */
async function loadOfServer() {
  const response = await request('metrics', {});
  const found = (await response.text()).matchAll(/^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)$/gm);
  const counts = Object.fromEntries([...found].map(([, name, value]) => [name, Number(value)]));
  if (!counts.running && !counts.waiting) return 'Ready';
  return `${counts.running} running${counts.waiting ? `, ${counts.waiting} waiting` : ''}`;
}

async function checkServer() {
  const before = page.server;
  try {
    const response = await request('ready', {});
    if (!response.ok) throw await failureOf(response);
    // A server that is back may have another model.
    if (!page.model || before === 'gone' || before === 'draining') await loadModel();
    showServer('ready', await loadOfServer());
    for (const kind of ['gone', 'draining', 'locked']) hideNotice(kind);
    if (before === 'gone' || before === 'draining') announce('The server is back.');
  } catch (error) {
    if (error.kind === 'locked') return askForKey();
    showServer(error.kind === 'draining' ? 'draining' : 'gone');
    if (!page.running && page.notice !== 'cut') showNotice(page.server, HINTS[page.server]);
  }
}

async function pollServer() {
  if (!document.hidden && page.server !== 'busy') await checkServer();
  setTimeout(pollServer, page.server === 'gone' ? POLL_WITHOUT_SERVER_MS : POLL_MS);
}

function selectMode(mode) {
  page.mode = mode;
  for (const each of Object.keys(modes)) {
    $(each).hidden = each !== mode;
    $(`tab-${each}`).setAttribute('aria-selected', each === mode);
    $(`tab-${each}`).tabIndex = each === mode ? 0 : -1;
  }
  $('gauges').hidden = mode === 'race';
  $('positions').hidden = mode === 'race' || !$('positions-bars').children.length;
  history.replaceState(null, '', `#${mode}`);
}

function moveBetweenTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(modes);
  selectMode(names[(names.indexOf(page.mode) + step + names.length) % names.length]);
  $(`tab-${page.mode}`).focus();
}

const isDark = () => getComputedStyle(document.documentElement).colorScheme === 'dark'
  || (!document.documentElement.dataset.theme && matchMedia('(prefers-color-scheme: dark)').matches);

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function switchTheme() {
  const theme = isDark() ? 'light' : 'dark';
  setTheme(theme);
  try { localStorage.setItem('secondguess-theme', theme); } catch { /* private windows */ }
  showThemeSwitch();
}

function showThemeSwitch() {
  $('theme').textContent = isDark() ? 'Light colours' : 'Dark colours';
}

function onKey(event) {
  if (event.key === 'Escape' && page.running) stop();
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
}

function start() {
  for (const mode of Object.keys(modes)) $(`tab-${mode}`).addEventListener('click', () => selectMode(mode));
  document.querySelector('[role=tablist]').addEventListener('keydown', moveBetweenTabs);
  for (const button of document.querySelectorAll('[data-run]')) button.addEventListener('click', run);
  for (const button of document.querySelectorAll('[data-stop]')) button.addEventListener('click', stop);
  document.addEventListener('keydown', onKey);
  document.addEventListener('visibilitychange', () => { if (!document.hidden) checkServer(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', showThemeSwitch);
  $('theme').addEventListener('click', switchTheme);
  $('new-chat').addEventListener('click', startConversation);
  $('key').addEventListener('change', checkServer);
  $('settings-form').addEventListener('submit', (event) => event.preventDefault());
  $('speculation').addEventListener('change', () => {
    $('max-draft-field').hidden = $('speculation').value !== 'bounded';
    $('max-draft').disabled = $('speculation').value !== 'bounded';
  });
  $('speculation').dispatchEvent(new Event('change'));
  if (/Mac|iPhone|iPad/.test(navigator.platform)) {
    for (const key of document.querySelectorAll('[data-run] kbd')) key.textContent = '⌘ Enter';
  }
  if (matchMedia('(max-width: 54rem)').matches) $('settings').open = false;
  const mode = location.hash.slice(1);
  selectMode(mode in modes ? mode : 'completion');
  showThemeSwitch();
  pollServer();
}

// Before the page is drawn, so that a chosen theme does not flash.
try { setTheme(localStorage.getItem('secondguess-theme')); } catch { /* private windows */ }
document.addEventListener('DOMContentLoaded', start);
