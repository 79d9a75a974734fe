// Loaded before the first paint, so that a chosen theme does not flash.
try {
  const theme = localStorage.getItem("foreword.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* storage is blocked: the system's theme */ }
