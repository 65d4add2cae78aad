// State of the server, and the one run of the page that it works for.

import { Failure, HINTS, request } from './api.js';
import { $, announce, hideNotice, number, page, showNotice, showServer } from './page.js';
import { readSettings } from './settings.js';

const POLL_MS = 5000;
const POLL_WITHOUT_SERVER_MS = 2000;

/** Call `work` with the settings and a signal, and show how it ends. */
export async function run(work) {
  if (page.running) return;
  hideNotice();
  const controller = new AbortController();
  page.running = controller;
  showRunning(true);
  try {
    if (!page.model) await loadModel();
    const settings = readSettings();
    if (settings) await work(settings, controller.signal);
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

export function stop() {
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

/** Ask for the model; the document gets an event `model` when the answer is there. */
async function loadModel() {
  page.model = await (await request('playground/model')).json();
  const { name, context_length: length } = page.model;
  const shown = /^[./]/.test(name) ? name.split('/').filter(Boolean).at(-1) : name; // of a path, its last part
  $('model').textContent = length ? `${shown}, context ${number(length)}` : shown;
  $('model').title = name;
  document.dispatchEvent(new Event('model'));
}

/** Return the load of the server in words, from its metrics. */
async function loadOfServer() {
  const response = await request('metrics');
  const found = (await response.text()).matchAll(/^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)$/gm);
  const counts = Object.fromEntries([...found].map(([, name, value]) => [name, Number(value)]));
  if (!counts.running && !counts.waiting) return 'Ready';
  return `${counts.running} running${counts.waiting ? `, ${counts.waiting} waiting` : ''}`;
}

export async function checkServer() {
  const before = page.server;
  try {
    await request('ready');
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

export async function pollServer() {
  if (!document.hidden && page.server !== 'busy') await checkServer();
  setTimeout(pollServer, page.server === 'gone' ? POLL_WITHOUT_SERVER_MS : POLL_MS);
}
