"""How the audit's report looks: light and dark, narrow and wide, on a screen and on paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --muted: #5b6675; --line: #dde2e9;
  --bar: #7f9fcb; --over: #b9a26a; --p50: #1f5fbf; --p99: #a0409a;
  --ok: #1a7f4b; --ok-soft: #e3f4ea; --bad: #c0322b; --bad-soft: #fbe9e7;
  --warn: #8a5a00; --warn-soft: #fdf3dc; --chip: #eef1f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11161d; --card: #1a212b; --ink: #e6ebf2; --muted: #9aa7b8; --line: #303a48;
    --bar: #54749f; --over: #8d7b4c; --p50: #82b4ff; --p99: #e79be0;
    --ok: #57c98a; --ok-soft: #17352a; --bad: #ff8a80; --bad-soft: #42211f;
    --warn: #f0c060; --warn-soft: #3a2f18; --chip: #27303d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main, header, footer { max-width: 1140px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
header p.name { margin: 0 0 10px; color: var(--muted); overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 0 0 4px; }
h3 { font-size: 1rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h3 small { color: var(--muted); font-weight: 400; }
p { margin: 6px 0; }
.lead { color: var(--muted); margin: 0 0 14px; max-width: 75ch; }
.muted { color: var(--muted); }
.verdict {
  display: flex; gap: 16px; align-items: flex-start; border-radius: 12px; padding: 18px 20px;
  border: 1px solid var(--line); border-left: 6px solid;
}
.verdict .sign { font-size: 1.75rem; line-height: 1.15; font-weight: 700; }
.verdict.ok { background: var(--ok-soft); border-left-color: var(--ok); }
.verdict.ok .sign { color: var(--ok); }
.verdict.bad { background: var(--bad-soft); border-left-color: var(--bad); }
.verdict.bad .sign { color: var(--bad); }
.note {
  background: var(--warn-soft); border-left: 4px solid var(--warn); border-radius: 6px;
  padding: 8px 14px; margin: 10px 0; overflow-wrap: anywhere;
}
dl.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(118px, 1fr)); gap: 10px;
  margin: 18px 0 0; }
dl.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 14px; }
dl.tiles dt { color: var(--muted); font-size: .85rem; }
dl.tiles dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 18px 20px; margin: 18px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
caption { text-align: left; color: var(--muted); padding-bottom: 6px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 500; font-size: .85rem; white-space: nowrap; }
tbody th { font-weight: 500; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.n, td.n { padding-right: 22px; }
th.n:last-child, td.n:last-child { padding-right: 0; }
tr.found th, tr.found .n:nth-child(2) { color: var(--bad); font-weight: 650; }
tr.clear { color: var(--muted); }
td.any, th.any { overflow-wrap: anywhere; min-width: 9ch; }
.when { white-space: nowrap; }
td.why { width: 38%; min-width: 26ch; }
code { font: .92em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
code.id { white-space: nowrap; }
.chip { display: inline-block; background: var(--bad-soft); color: var(--bad); border-radius: 6px;
  padding: 0 8px; margin: 0 4px 2px 0; font-size: .85rem; white-space: nowrap; }
.verdict .chip { background: var(--card); margin-bottom: 4px; }
.chip.plain { background: var(--chip); color: var(--ink); }
svg { display: block; width: 100%; }
svg text { font-size: 12px; fill: var(--ink); }
svg text.muted { fill: var(--muted); }
svg text.tick { fill: var(--muted); font-size: 11.5px; }
.plot { height: auto; overflow: visible; }
.plot .axis { stroke: var(--muted); stroke-width: 1; }
.plot .grid { stroke: var(--line); stroke-width: 1; stroke-dasharray: 3 3; }
.plot .bar { fill: var(--bar); }
.plot .bar.over { fill: var(--over); }
.plot .mark line { stroke-width: 1.5; }
.plot .mark text { font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.plot .p50 line { stroke: var(--p50); } .plot .p50 text { fill: var(--p50); }
.plot .p99 line { stroke: var(--p99); stroke-dasharray: 5 3; } .plot .p99 text { fill: var(--p99); }
.history .kind { display: grid; gap: 2px 14px; align-items: end; margin-top: 8px;
  grid-template: "label row most" / 14rem minmax(0, calc(var(--runs) * 48px)) 6rem; }
.history .label { grid-area: label; line-height: 1.25; padding-bottom: 1px; }
.history .row, .history .dates { grid-area: row; }
.history .most { grid-area: most; color: var(--muted); font-size: .85rem; white-space: nowrap; }
.row { height: 38px; border-bottom: 1px solid var(--line); }
.row .ok { fill: var(--ok); } .row .none { fill: var(--line); } .row .bad { fill: var(--bad); }
.row rect { opacity: .62; } .row rect.newest { opacity: 1; }
.dates { display: flex; justify-content: space-between; color: var(--muted); font-size: .85rem; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr));
  gap: 22px 30px; margin-bottom: 14px; }
.pair > div { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 210px), 1fr));
  gap: 10px 20px; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--muted); font-size: .85rem; margin: 2px 0 4px; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr));
  gap: 18px 36px; align-items: start; }
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--p50); }
footer { color: var(--muted); font-size: .85rem; padding-bottom: 40px; }
@media (max-width: 620px) {
  main, header, footer { padding-left: 12px; padding-right: 12px; }
  section { padding: 14px; }
  h1 { font-size: 1.4rem; }
  .history .kind { grid-template: "label most" "row row" / 1fr auto; }
  table.stack thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  table.stack tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  table.stack tr:last-child { border-bottom: 0; }
  table.stack th, table.stack td { display: block; border: 0; padding: 1px 0; text-align: left; }
  table.stack .when { white-space: nowrap; }
td.why { width: auto; }
  table.stack td.n { display: inline-block; margin-right: 18px; }
  table.stack [data-name]::before { content: attr(data-name) " "; color: var(--muted);
    font-weight: 400; font-size: .85rem; }
}
@media print {
  :root { color-scheme: light; --page: #fff; }
  @page { margin: 14mm 12mm; }
  body { font-size: 9.5pt; }
  main, header, footer { padding: 0; max-width: none; }
  section { border: 0; padding: 0; margin: 14pt 0; }
  h2, .lead { break-after: avoid; }
  tr, figure, .pair, .verdict, .history { break-inside: avoid; }
  details:not([open]) { display: none; }
  .scroll { overflow: visible; }
  .chip { white-space: normal; }
  code.id { font-size: 8pt; }
  td.why { min-width: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
