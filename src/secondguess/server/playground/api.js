// Requests to the server's API.

import { $, hideNotice, showNotice, showServer } from './page.js';

const MAX_ATTEMPTS = 6; // requests that the server refused because it is busy

export const HINTS = {
  gone: 'The server does not answer. The page tries again every two seconds; nothing that you have typed is lost.',
  draining: 'The server is shutting down: it finishes the requests that it has and accepts no others.',
  locked: 'The server needs an API key. Enter it in the settings.',
};

/** Request that did not give a complete reply. `kind`: gone, busy, draining, locked, refused, failed or cut. */
export class Failure extends Error {
  constructor(kind, message, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

/** Return the headers of a request with a body of this type. */
export function headers(type = 'application/json') {
  const key = $('key').value.trim();
  return { 'Content-Type': type, ...(key && { Authorization: `Bearer ${key}` }) };
}

/** Return the response to a request with the API key, whose errors become a Failure. */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: 'no-store', headers: headers(), ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure('gone', HINTS.gone);
  }
  if (!response.ok) throw await failureOf(response);
  return response;
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
  const response = await request(path, { method: 'POST', body: JSON.stringify(body), signal });
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
export async function* stream(path, body, signal, onSend = () => {}) {
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

export function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => { clearTimeout(timer); reject(signal.reason); };
    const timer = setTimeout(() => { signal.removeEventListener('abort', stop); resolve(); }, milliseconds);
    signal.addEventListener('abort', stop, { once: true });
    if (signal.aborted) stop();
  });
}
