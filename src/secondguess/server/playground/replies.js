// Replies as they arrive: text by origin, and counts.

import { stream } from './api.js';
import { announce, create } from './page.js';

const FINISHED = { stop: 'an end token or a stop string', length: 'max tokens reached', context: 'context full' };

/**
 * Return the segments [text, kind] of a chunk; kind is empty where the server does not report it.
 *
 * Rejected draft tokens stand before the token that was sampled in their place, the last of the chunk.
 */
function segmentsOf(chunk) {
  return chunk.choices.flatMap((choice) => {
    const text = choice.text ?? choice.delta?.content ?? '';
    if (!choice.secondguess) return text ? [[text, '']] : [];
    const { segments, rejected } = choice.secondguess;
    const kinds = segments.map(([part, drafted]) => [part, drafted ? 'drafted' : 'sampled']);
    if (rejected) kinds.splice(kinds.at(-1)?.[1] === 'sampled' ? -1 : kinds.length, 0, [rejected, 'rejected']);
    return kinds;
  });
}

/** Return the text of segments, without rejected drafts. */
export const textOf = (segments) => segments.map(([text, kind]) => (kind === 'rejected' ? '' : text)).join('');

/** Call `change`, and keep the end of an element's content in view if it was. */
export function keepingEnd(scroller, change) {
  const { scrollHeight, scrollTop, clientHeight } = scroller;
  change();
  if (scrollHeight - scrollTop - clientHeight < 40) scroller.scrollTop = scroller.scrollHeight;
}

/** Element that text is appended to; it scrolls along while its end is in view. */
export class TextView {
  constructor(element, scroller = element) {
    this.element = element;
    this.scroller = scroller;
  }

  clear(given = '') {
    this.element.replaceChildren();
    if (given) this.add([[given, 'given']]);
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  add(segments) {
    const spans = segments.map(([text, kind]) => {
      // A ghost is no part of the text: its line breaks are signs, and it is neither read out nor copied.
      if (kind !== 'rejected') return create('span', { className: kind, textContent: text });
      return create('del', { className: kind, textContent: text.replaceAll('\n', '⏎'), ariaHidden: true });
    });
    keepingEnd(this.scroller, () => this.element.append(...spans));
  }
}

/** Counts of one reply: characters as they arrive, and the server's statistics at the end. */
export class Tally {
  constructor() {
    this.text = '';
    this.reasoning = '';
    this.calls = []; // of tools
    this.areCallsComplete = false;
    this.numDrafted = 0;
    this.isOriginKnown = false;
    this.stats = null;
    this.numTokens = null;
    this.ending = null;
    this.begin();
  }

  begin() {
    this.start = performance.now();
    this.seconds = 0;
  }

  /** Count a chunk; return its segments. */
  add(chunk) {
    const segments = segmentsOf(chunk);
    for (const [text, kind] of segments) {
      if (kind === 'rejected') continue;
      this.text += text;
      this.isOriginKnown ||= kind !== '';
      if (kind === 'drafted') this.numDrafted += text.length;
    }
    const { reasoning_content: reasoning = '', tool_calls: calls = [] } = chunk.choices[0]?.delta ?? {};
    this.reasoning += reasoning;
    for (const { index, id, function: part } of calls) {
      this.calls[index] ??= { id, name: part.name, arguments: '' };
      this.calls[index].arguments += part.arguments ?? '';
    }
    this.areCallsComplete ||= chunk.choices[0]?.finish_reason === 'tool_calls';
    if (segments.length || reasoning || calls.length) this.seconds = (performance.now() - this.start) / 1000;
    this.numTokens = chunk.usage?.completion_tokens ?? this.numTokens;
    this.stats = chunk.secondguess?.samples?.[0] ?? this.stats;
    this.ending = this.stats?.finish_reason ?? chunk.choices[0]?.finish_reason ?? this.ending;
    return segments;
  }

  get numCharacters() {
    return this.calls.reduce((sum, call) => sum + call.arguments.length, this.text.length + this.reasoning.length);
  }

  get charactersPerSecond() {
    return this.numCharacters / ((performance.now() - this.start) / 1000);
  }
}

/** Call `draw` once per frame until the returned function is called, which draws a last time. */
export function everyFrame(draw) {
  let frame = requestAnimationFrame(function next() {
    draw();
    frame = requestAnimationFrame(next);
  });
  return () => { cancelAnimationFrame(frame); draw(); };
}

/**
 * Send a request and count its reply.
 *
 * @param tally counts, also of a reply that fails.
 * @param element is marked as running meanwhile.
 * @param show is called with the segments of each chunk.
 * @param draw is called once per frame.
 */
export async function follow(path, body, signal, { tally, element, show, draw }) {
  const finish = everyFrame(draw);
  element.classList.add('running');
  try {
    for await (const chunk of stream(path, body, signal, () => tally.begin())) show(tally.add(chunk));
    announce(`Finished: ${tally.numTokens} tokens, ${FINISHED[tally.ending] ?? 'finished'}.`);
  } finally {
    element.classList.remove('running');
    finish();
  }
}
