"""How the page looks: light and dark, on any width, on paper. Colours are told apart without red and green."""

from autopar.page.markup import Markup

STYLE = Markup("""
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1d2430; --dim: #5a6474; --line: #dfe3e9; --soft: #f5f6f8; --link: #1f5fbf;
  --a: #2f6db5; --b: #8db6df; --c: #1b998b; --d: #7353ba; --e: #c27c0e; --f: #6cc3d5; --g: #98a1ae; --h: #d8c9a3;
  --x: #c8283f; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181f; --ink: #e4e8ee; --dim: #9aa5b4; --line: #323a46; --soft: #1c222b; --link: #7fb2f5;
  --a: #4f8fdb; --b: #9cc4ea; --c: #2fb5a5; --d: #9a7fe0; --e: #dd9a35; --f: #58b4c8; --g: #7d8898; --h: #b9a877;
  --x: #f0566b; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 10px; padding-top: 14px; border-top: 1px solid var(--line); }
p, ul { margin: 6px 0; max-width: 90ch; }
ul { padding-left: 20px; }
code { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.dim { color: var(--dim); fill: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 20px 0 0;
  padding: 0; }
.cards div { background: var(--soft); border-radius: 8px; padding: 12px 14px; min-width: 0; }
.cards dt { color: var(--dim); font-size: 13px; }
.cards dd { margin: 0; }
.cards dd.value { font-size: 22px; line-height: 1.3; font-weight: 600; }
.cards dd.note { font-size: 12.5px; line-height: 1.4; color: var(--dim); }
.cards svg { display: block; margin: 4px 0 6px; }
.track { fill: var(--line); }
.wide { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; font-size: 13.5px; }
caption { text-align: left; color: var(--dim); padding-bottom: 4px; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); }
th { font-weight: 500; }
thead th { color: var(--dim); font-size: 12.5px; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
td.bar { min-width: 110px; width: 22%; vertical-align: middle; }
tr.chosen th, tr.chosen td { font-weight: 650; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 390px), 1fr)); gap: 0 36px; }
.columns > * { min-width: 0; }
figure { margin: 16px 0; }
figcaption { font-size: 13px; color: var(--dim); margin-top: 6px; max-width: 90ch; }
.above { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 6px 24px; margin-bottom: 8px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 0; font-size: 13px;
  max-width: none; }
.sw { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; vertical-align: -1px;
  background: currentColor; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); } .e { fill: var(--e); }
.f { fill: var(--f); } .g { fill: var(--g); } .h { fill: var(--h); } .x { fill: var(--x); }
i.a { color: var(--a); } i.b { color: var(--b); } i.c { color: var(--c); } i.d { color: var(--d); }
i.e { color: var(--e); } i.f { color: var(--f); } i.g { color: var(--g); } i.h { color: var(--h); }
i.x { color: var(--x); }
.zoom { border: 0; padding: 0; margin: 0; font-size: 13px; display: flex; gap: 10px; color: var(--dim); }
.zoom legend { float: left; padding: 0; margin-right: 10px; }
.zoom label { white-space: nowrap; cursor: pointer; }
.zoom input { margin: 0 4px 0 0; vertical-align: -1px; accent-color: var(--link); }
.frame { display: grid; grid-template-columns: 104px minmax(0, 1fr); }
.scroll { overflow-x: auto; overflow-y: hidden; }
.scroll > svg, .names > svg { display: block; margin-bottom: 14px; }
.scroll > svg { width: 100%; }
.z4, .z16 { display: none; }
.step:has(input[value="4"]:checked) .scroll > svg { width: 400%; }
.step:has(input[value="16"]:checked) .scroll > svg { width: 1600%; }
.step:has(input[value="4"]:checked) .z4, .step:has(input[value="16"]:checked) .z16 { display: inline; }
.step:has(input[value="4"]:checked) .z1, .step:has(input[value="16"]:checked) .z1 { display: none; }
svg text { font-size: 12px; fill: var(--ink); }
svg text.dim, .scroll .z1 text, .scroll .z4 text, .scroll .z16 text { fill: var(--dim); }
.grid { stroke: var(--line); stroke-width: 1; }
.lane { fill: var(--soft); }
.phase { fill: var(--soft); stroke: var(--line); }
rect.x[height="22"] { fill: url(#ap-hatch); }
.stroke { stroke: var(--x); stroke-width: 2; fill: none; }
.peak { stroke: var(--ink); stroke-dasharray: 3 3; }
text.peak { stroke: none; }
.limit { stroke: var(--x); stroke-width: 1.5; }
text.limit { fill: var(--x); paint-order: stroke; stroke: var(--paper); stroke-width: 4; }
.short text { display: none; }
.step:has(input[value="4"]:checked) .short text, .step:has(input[value="16"]:checked) .short text { display: inline; }
span.last { display: inline-block; min-width: 210px; }
.curve { fill: none; stroke: var(--a); stroke-width: 2; vector-effect: non-scaling-stroke; }
.times { color: var(--dim); white-space: nowrap; }
.modules table { width: 100%; }
.modules td div + div { margin-top: 2px; }
.modules code { white-space: normal; }
.modules th[scope=row] { overflow-wrap: anywhere; min-width: 180px; }
.lives { color: var(--e); }
.sent { white-space: nowrap; }
footer { margin-top: 40px; color: var(--dim); font-size: 13px; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media (max-width: 760px) {
  main { padding: 18px 14px 36px; }
  .frame { grid-template-columns: 78px minmax(0, 1fr); }
  svg text { font-size: 11px; }
  .cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  .modules table, .modules tbody, .modules tr, .modules td, .modules th[scope=row], .modules caption { display: block; }
  .modules thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .modules tr { border-bottom: 1px solid var(--line); padding: 8px 0; }
  .modules td, .modules th[scope=row] { border: 0; padding: 2px 0; }
  .modules td:empty { display: none; }
  .modules td[data-label]::before { content: attr(data-label); display: block; color: var(--dim); font-size: 12px; }
  th, td { padding-right: 12px; }
}
@media print {
  :root { --paper: #fff; --ink: #000; --dim: #444; --line: #ccc; --soft: #f2f2f2; }
  body { font-size: 11px; } main { padding: 0; max-width: none; }
  .zoom { display: none; } .wide, .scroll { overflow: visible; }
  h2 { break-after: avoid; } tr, figure, .cards div { break-inside: avoid; }
  svg, .sw { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""")
