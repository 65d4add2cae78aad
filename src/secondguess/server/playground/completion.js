// Mode of completions, and the gauges below its text.

import { $, create, number, percent, rate } from './page.js';
import { Tally, TextView, follow } from './replies.js';

export async function complete(prompt, settings, signal) {
  const view = new TextView($('completion-output'));
  const tally = new Tally();
  view.clear(prompt);
  await follow('v1/completions', { ...settings, prompt }, signal, {
    tally,
    element: view.element,
    show: (segments) => view.add(segments),
    draw: () => showGauges(tally),
  });
}

function showGauge(name, value, unit) {
  $(`gauge-${name}`).textContent = value;
  $(`gauge-${name}-unit`).textContent = unit;
}

function showGauges(tally) {
  const { stats, text, numDrafted } = tally;
  const share = stats ? stats.num_accepted / stats.num_tokens : numDrafted / text.length;
  const isShareKnown = Number.isFinite(share) && (stats || tally.isOriginKnown);
  showGauge('share', isShareKnown ? percent(share) : '', stats ? `of ${number(stats.num_tokens)} tokens` : 'of the text');
  if (!stats) {
    showGauge('speed', text && rate(tally.charactersPerSecond), text ? 'characters/s' : 'tokens/s');
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
  $('positions').hidden = drafted.length === 0;
  $('positions-bars').replaceChildren(...drafted.map((count, place) => {
    const accepted = stats.accepted_per_position[place] ?? 0;
    const bar = create('div', { className: 'bar' }, create('i'));
    bar.firstChild.style.setProperty('--share', accepted / count);
    const title = `position ${place + 1}: ${accepted} of ${count} accepted`;
    return create('li', { title }, bar, create('b', { textContent: place + 1 }), percent(accepted / count));
  }));
}
