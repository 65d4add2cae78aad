// Mode of races: the same prompt plainly and speculatively, in two lanes.

import { sleep, stream } from './api.js';
import { $, announce, number, page, percent, rate } from './page.js';
import { Tally, TextView, everyFrame } from './replies.js';

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

  show({ segments, reasoning }, goal) {
    if (reasoning) this.view.add([[reasoning, 'given']]);
    this.view.add(segments);
    this.numShown += reasoning.length;
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
  async record(path, body, signal, goal) {
    const finish = everyFrame(() => this.showPace(this.tally.start));
    this.view.element.classList.add('running');
    try {
      for await (const chunk of stream(path, body, signal, () => this.tally.begin())) {
        const part = { segments: this.tally.add(chunk), reasoning: chunk.choices[0]?.delta?.reasoning_content ?? '' };
        this.parts.push({ ...part, at: this.tally.seconds });
        this.show(part, goal);
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
      for (const part of this.parts) {
        const wait = 1000 * part.at - (performance.now() - start);
        if (wait > 0) await sleep(wait, signal);
        this.show(part, this.tally.numCharacters);
      }
    } finally {
      finish();
    }
    this.showResult();
  }
}

/** Race on a prompt: a message for a model with a chat template, otherwise the beginning of a text. */
export async function race(prompt, settings, signal) {
  const isChat = page.model.has_chat_template;
  const path = isChat ? 'v1/chat/completions' : 'v1/completions';
  const asked = isChat ? { messages: [{ role: 'user', content: prompt }] } : { prompt };
  // The same seed, also where the model's own temperature is above 0.
  const body = { ...settings, ...asked, seed: settings.seed ?? Math.floor(Math.random() * 2 ** 32) };
  const plain = { ...body, speculation: 'off' };
  const speculative = { ...body, speculation: body.speculation === 'off' ? 'auto' : body.speculation };
  const lanes = ['lane-plain', 'lane-speculative'].map((id) => new Lane(id, isChat ? '' : prompt));
  $('lanes').scrollIntoView({ block: 'nearest' });
  try {
    showVerdict('Warming up, so that both runs find the prompt in the cache.');
    for await (const _ of stream(path, { ...plain, max_tokens: 1 }, signal)) { /* only for the cache */ }
    showVerdict('Plain decoding runs alone.');
    await lanes[0].record(path, plain, signal);
    showVerdict('Speculative decoding runs alone. The plain run is replayed beside it at the speed it had.');
    await Promise.all([lanes[0].replay(signal), lanes[1].record(path, speculative, signal, lanes[0].tally.numCharacters)]);
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
