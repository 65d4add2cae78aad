// Playground of the secondguess server. Text from the server and the user becomes elements only in markdown.js.

import { sendMessage, startChat } from './chat.js';
import { complete } from './completion.js';
import { $, page, showNotice } from './page.js';
import { race } from './race.js';
import { checkServer, pollServer, run, stop } from './server.js';
import { showDefaults, startSettings } from './settings.js';

const RACE_MESSAGE = `Show this function with type hints and a docstring:
def mean(values):
    if not values:
        raise ValueError("expected a value")
    return sum(values) / len(values)`;

const modes = { chat: sendMessage, completion: () => runPrompt(complete), race: () => runPrompt(race) };

function runPrompt(work) {
  const field = $(`${page.mode}-prompt`);
  if (page.running) return;
  if (!field.value) {
    field.focus();
    return showNotice('empty', 'Enter some text first.');
  }
  run((settings, signal) => work(field.value, settings, signal));
}

const runMode = () => modes[page.mode]();

function selectMode(mode) {
  page.mode = mode;
  document.body.dataset.mode = mode;
  for (const each of Object.keys(modes)) {
    $(each).hidden = each !== mode;
    $(`tab-${each}`).setAttribute('aria-selected', each === mode);
    $(`tab-${each}`).tabIndex = each === mode ? 0 : -1;
  }
  showDefaults();
}

/** Select a mode and name it in the address, so that a reload shows it again. */
function chooseMode(mode) {
  selectMode(mode);
  history.replaceState(null, '', `#${mode}`);
}

function onModel() {
  const { has_chat_template: canChat } = page.model;
  const race = $('race-prompt');
  if (canChat && race.value === race.defaultValue) race.value = race.defaultValue = RACE_MESSAGE;
  $('tab-chat').hidden = !canChat;
  if (!canChat && page.mode === 'chat') selectMode('completion');
  showDefaults();
}

function moveBetweenTabs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(modes).filter((mode) => !$(`tab-${mode}`).hidden);
  chooseMode(names[(names.indexOf(page.mode) + step + names.length) % names.length]);
  $(`tab-${page.mode}`).focus();
}

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === 'Escape' && page.running) stop();
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    runMode();
  }
}

for (const mode of Object.keys(modes)) $(`tab-${mode}`).addEventListener('click', () => chooseMode(mode));
document.querySelector('[role=tablist]').addEventListener('keydown', moveBetweenTabs);
for (const button of document.querySelectorAll('[data-run]')) button.addEventListener('click', runMode);
for (const button of document.querySelectorAll('[data-stop]')) button.addEventListener('click', stop);
document.addEventListener('keydown', onKey);
document.addEventListener('model', onModel);
document.addEventListener('visibilitychange', () => { if (!document.hidden) checkServer(); });
$('key').addEventListener('change', checkServer);
if (/Mac|iPhone|iPad/.test(navigator.platform)) {
  for (const key of document.querySelectorAll('.control-enter')) key.textContent = '⌘ Enter';
}
const modeOfAddress = location.hash.slice(1);
selectMode(modeOfAddress in modes ? modeOfAddress : 'chat');
startSettings();
startChat();
pollServer();
