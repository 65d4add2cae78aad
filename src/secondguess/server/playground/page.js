// State that the parts of the page share, and its messages to the user.

export const page = { mode: 'chat', server: 'unknown', model: null, running: null, notice: null };
export const $ = (id) => document.getElementById(id);

const SERVER_TEXTS = { ready: 'Ready', gone: 'No answer', draining: 'Shutting down', locked: 'API key needed' };

export const number = (value, digits = 0) => (
  value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits })
);
export const percent = (share) => `${number(100 * share)} %`;
export const rate = (value) => number(value, value < 10 ? 1 : 0);

/** Return a new element with these properties and children. */
export function create(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Return whether the window is at most this wide. */
export const isNarrow = (width) => matchMedia(`(max-width: ${width})`).matches;

/** Show a text to readers of screens. */
export function announce(text) {
  $('status').textContent = text;
}

export function showNotice(kind, text) {
  page.notice = kind;
  $('notice').hidden = false;
  $('notice').dataset.kind = ['busy', 'draining', 'empty'].includes(kind) ? 'wait' : 'bad';
  if ($('notice').textContent !== text) $('notice').textContent = text;
}

/** Hide the notice, or only a notice of this kind. */
export function hideNotice(kind = page.notice) {
  if (page.notice !== kind) return;
  page.notice = null;
  $('notice').hidden = true;
  $('notice').textContent = '';
}

export function showServer(state, text = SERVER_TEXTS[state]) {
  page.server = state;
  $('server').dataset.state = state;
  if ($('server-text').textContent !== text) $('server-text').textContent = text;
}

/** Copy a text; pages that are not loaded over HTTPS or from this machine lack the clipboard, but have the command. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement;
  const field = create('textarea', { value: text, className: 'visually-hidden' });
  document.body.append(field);
  field.select();
  document.execCommand('copy');
  field.remove();
  before?.focus();
}

/** Copy a text, and say so on the button for two seconds. */
export async function copyWith(button, text) {
  const label = button.textContent;
  try {
    await copy(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Not allowed';
  }
  announce(button.textContent);
  setTimeout(() => { button.textContent = label; }, 2000);
}
