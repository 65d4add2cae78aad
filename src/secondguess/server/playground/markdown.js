// Replies as Markdown, which the server renders; in this module alone, HTML becomes elements.

import { headers, request } from './api.js';
import { $, copyWith, create } from './page.js';
import { TextView, keepingEnd, textOf } from './replies.js';

const PAUSE_MS = 80; // between two renderings of a reply
const MAX_SHARE = 0.2; // of the time, spent on rendering

const highlights = window.CSS?.highlights;
if (highlights) for (const kind of ['drafted', 'sampled']) highlights.set(kind, new Highlight());

/** Return whether replies are shown as the tokens that they consist of: rejected drafts have no place in Markdown. */
const isShownAsTokens = () => $('colours').checked && ($('ghosts').checked || !highlights);

/** Return the elements of Markdown. The server has escaped every text of it; scripts and event handlers are refused, too. */
async function elementsOf(markdown) {
  const options = { method: 'POST', headers: headers('text/markdown'), body: markdown };
  const { html } = await (await request('playground/markdown', options)).json();
  const { body } = new DOMParser().parseFromString(html, 'text/html');
  for (const block of body.querySelectorAll('pre')) addCopyButton(block);
  return [...body.children];
}

function addCopyButton(block) {
  const language = block.firstChild.className.replace('language-', '');
  const button = create('button', { type: 'button', className: 'quiet', textContent: 'Copy', ariaLabel: 'Copy code' });
  button.dataset.copyCode = '';
  const head = create('div', { className: 'code-head' }, create('span', { textContent: language }), button);
  block.tabIndex = 0; // it scrolls, so that the keyboard must reach it
  block.replaceWith(create('div', { className: 'code' }, head, block.cloneNode(true)));
}

export function onCopyCode({ target }) {
  if ('copyCode' in target.dataset) copyWith(target, target.closest('.code').querySelector('pre').textContent);
}

/** Replace the children that differ: a selection, and the focus, stay where the text is the same. */
function replaceChildren(element, children) {
  children.forEach((child, index) => {
    const shown = element.childNodes[index];
    if (!shown) element.append(child);
    else if (!shown.isEqualNode(child)) shown.replaceWith(child);
  });
  while (element.childNodes.length > children.length) element.lastChild.remove();
}

/**
 * Return the origins of Markdown's text as [range, kind].
 *
 * What is shown is the text without Markdown's signs: each line of it is searched in the text, from the last one on.
 */
function originsOf(element, segments) {
  const text = textOf(segments);
  const kinds = segments.flatMap(([part, kind]) => (kind === 'rejected' ? [] : Array(part.length).fill(kind)));
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const origins = [];
  let end = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest('.code-head')) continue;
    for (const { 0: line, index } of node.data.matchAll(/[^\n]+/g)) {
      const start = text.indexOf(line, end);
      if (start < 0) continue;
      end = start + line.length;
      for (let from = start; from < end;) {
        let to = from + 1;
        while (to < end && kinds[to] === kinds[from]) to += 1;
        const [startOffset, endOffset] = [from, to].map((place) => index + place - start);
        if (kinds[from]) {
          origins.push([new StaticRange({ startContainer: node, startOffset, endContainer: node, endOffset }), kinds[from]]);
        }
        from = to;
      }
    }
  }
  return origins;
}

/** Reply that is shown as Markdown, or as tokens. */
export class ReplyView {
  constructor(scroller, segments) {
    this.element = create('div', { className: 'reply' });
    this.scroller = scroller;
    this.segments = segments;
    this.tokens = new TextView(this.element, scroller);
    this.origins = [];
    this.isRendered = this.isStale = this.isRendering = false;
  }

  add(segments) {
    for (const [text, kind] of segments) {
      const last = this.segments.at(-1);
      if (last?.[1] === kind) last[0] += text;
      else this.segments.push([text, kind]);
    }
    if (isShownAsTokens()) this.tokens.add(segments);
    else this.renderSoon();
  }

  /** Show the reply as the settings say. */
  refresh() {
    this.clearOrigins();
    const { classList } = this.element;
    const isSame = classList.contains('tokens') === isShownAsTokens();
    classList.toggle('tokens', isShownAsTokens());
    if (!isShownAsTokens()) return isSame && this.isRendered ? this.showOrigins() : this.renderSoon();
    if (isSame) return;
    this.element.replaceChildren();
    this.tokens.add(this.segments);
  }

  /** Render the text, with pauses while it grows; the last text is always rendered. */
  async renderSoon() {
    this.isStale = true;
    if (this.isRendering) return;
    this.isRendering = true;
    while (this.isStale && !isShownAsTokens()) {
      this.isStale = false;
      const start = performance.now();
      await this.render();
      const pause = Math.max(PAUSE_MS, (performance.now() - start) / MAX_SHARE);
      if (this.element.classList.contains('running')) await new Promise((resolve) => setTimeout(resolve, pause));
    }
    this.isRendering = false;
  }

  async render() {
    const text = textOf(this.segments);
    let children = [];
    try {
      if (text) children = await elementsOf(text);
      this.isRendered = true;
    } catch { // the server is gone or refuses the text: it is shown as it is
      children = [create('p', { className: 'plain', textContent: text })];
      this.isRendered = false;
    }
    if (isShownAsTokens()) return; // the choice was made meanwhile
    keepingEnd(this.scroller, () => replaceChildren(this.element, children));
    this.showOrigins();
  }

  showOrigins() {
    this.clearOrigins();
    if (!highlights || !$('colours').checked || !this.element.isConnected) return;
    this.origins = originsOf(this.element, this.segments);
    for (const [range, kind] of this.origins) highlights.get(kind).add(range);
  }

  clearOrigins() {
    for (const [range, kind] of this.origins) highlights.get(kind).delete(range);
    this.origins = [];
  }
}
