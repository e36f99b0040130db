/* Before anything is painted: the theme that was chosen here, else the system's. */
'use strict';
(function () {
  const asked = new URLSearchParams(location.search).get('theme');
  let kept = null;
  try {
    kept = localStorage.getItem('greenroom-theme');
  } catch { /* storage is off */ }
  const wanted = asked === 'dark' || asked === 'light' ? asked : kept;
  const light = wanted ? wanted === 'light' : matchMedia('(prefers-color-scheme: light)').matches;
  document.documentElement.dataset.theme = light ? 'light' : 'dark';
}());
