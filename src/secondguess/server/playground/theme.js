// Theme of the page. This script is no module, so that a chosen theme is set before the page is drawn.
'use strict';

{
  const root = document.documentElement;
  const systemIsDark = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : systemIsDark.matches);
  const showSwitch = () => {
    document.getElementById('theme').textContent = isDark() ? 'Light' : 'Dark';
  };

  try {
    const theme = localStorage.getItem('secondguess-theme');
    if (theme) root.dataset.theme = theme;
  } catch { /* storage is refused: the system's theme is used */ }

  systemIsDark.addEventListener('change', showSwitch);
  document.addEventListener('DOMContentLoaded', () => {
    showSwitch();
    document.getElementById('theme').addEventListener('click', () => {
      root.dataset.theme = isDark() ? 'light' : 'dark';
      try { localStorage.setItem('secondguess-theme', root.dataset.theme); } catch { /* not kept */ }
      showSwitch();
    });
  });
}
