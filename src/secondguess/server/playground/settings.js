// Settings: fields of requests, and choices that are kept for the next visit.

import { $, isNarrow, number, page } from './page.js';
import { read, write } from './storage.js';

const KEY = 'secondguess-settings';
const MAX_TOKENS = 256; // of a completion or a race; base models seldom end a text
const JSON_FIELDS = ['schema', 'tools']; // of chats
const KEPT = ['system', 'temperature', 'top-p', 'max-tokens', 'seed', 'stop', ...JSON_FIELDS, 'speculation', 'max-draft', 'colours', 'ghosts'];

/** Return the number in a field; undefined, which JSON leaves out, for an empty one. */
const numberIn = (id) => ($(id).value === '' ? undefined : Number($(id).value));

const defaultMaxTokens = () => (page.mode === 'chat' ? undefined : MAX_TOKENS);

/** Return the JSON in a field of chats; undefined for an empty one, and for one that is invalid, which is marked. */
function jsonIn(id) {
  const field = $(id);
  field.setCustomValidity('');
  if (page.mode !== 'chat' || !field.value.trim()) return undefined;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.setCustomValidity(`Expected JSON: ${error.message}`);
    return undefined;
  }
}

/** Return the settings as fields of a request, or null after an invalid one has been shown. */
export function readSettings() {
  const [schema, tools] = JSON_FIELDS.map(jsonIn);
  if (!$('settings-form').checkValidity()) {
    $('settings').open = true;
    $('settings-form').reportValidity();
    return null;
  }
  const stop = $('stop').value.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n').replaceAll('\\t', '\t'));
  const speculation = $('speculation').value;
  return {
    model: page.model.name,
    stream: true,
    stream_options: { include_usage: true },
    report: true,
    temperature: numberIn('temperature'),
    top_p: numberIn('top-p'),
    max_tokens: numberIn('max-tokens') ?? defaultMaxTokens(),
    seed: numberIn('seed'),
    stop: stop.length ? stop : undefined,
    response_format: schema && { type: 'json_schema', json_schema: { name: 'reply', schema } },
    tools,
    speculation: speculation === 'bounded' ? { max_draft: numberIn('max-draft') ?? 4 } : speculation,
  };
}

/** Show what holds where a field is empty. */
export function showDefaults() {
  const { sampling = {}, max_tokens: maxTokens } = page.model ?? {};
  $('temperature').placeholder = sampling.temperature ?? '';
  $('top-p').placeholder = sampling.top_p ?? '';
  const limit = defaultMaxTokens() ?? maxTokens;
  $('max-tokens').placeholder = limit ? number(limit) : 'all that fit the context';
}

const valueOf = (field) => (field.type === 'checkbox' ? 'checked' : 'value');

function keepSettings() {
  write(KEY, Object.fromEntries(KEPT.map((id) => [id, $(id)[valueOf($(id))]])));
}

function showDraftLimit() {
  $('max-draft-field').hidden = $('speculation').value !== 'bounded';
  $('max-draft').disabled = $('speculation').value !== 'bounded';
}

export function startSettings() {
  const kept = read(KEY) ?? {};
  for (const id of KEPT) {
    if (typeof kept[id] === typeof $(id)[valueOf($(id))]) $(id)[valueOf($(id))] = kept[id];
    $(id).addEventListener('change', keepSettings);
  }
  $('settings-form').addEventListener('submit', (event) => event.preventDefault());
  $('speculation').addEventListener('change', showDraftLimit);
  showDraftLimit();
  if (isNarrow('54rem')) $('settings').open = false;
}
