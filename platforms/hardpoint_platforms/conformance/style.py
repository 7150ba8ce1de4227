"""The style sheet of the HTML report."""

from __future__ import annotations

STYLE = """
:root { --bg: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #69727d; --line: #e3e5e8;
  --pass: #1f8a4c; --pass-bg: #dff3e6; --fail: #c02b2b; --fail-bg: #fbdcdc;
  --refused: #8a6414; --refused-bg: #f8ecd0; --unverified: #69727d; --unverified-bg: #eceef0; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e6e8ea; --soft: #97a1ab;
  --line: #30363d; --pass: #6fd197; --pass-bg: #17352399; --fail: #ff8f8f; --fail-bg: #4a1d1d;
  --refused: #e6be6c; --refused-bg: #3d311499; --unverified: #97a1ab; --unverified-bg: #262b30; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 60px }
header { display: flex; justify-content: space-between; align-items: flex-end; gap: 24px; flex-wrap: wrap }
h1 { font-size: 28px; margin: 0; letter-spacing: -.01em } h2 { font-size: 17px; margin: 0 0 10px }
header p { margin: 4px 0 0; color: var(--soft) }
.tiles { display: flex; gap: 10px; flex-wrap: wrap } .tile { min-width: 84px; padding: 8px 12px; border-radius: 8px }
.tile b { display: block; font-size: 22px; line-height: 1.2 } .tile span { font-size: 12px }
.pass { color: var(--pass); background: var(--pass-bg) } .fail { color: var(--fail); background: var(--fail-bg) }
.refused { color: var(--refused); background: var(--refused-bg) }
.unverified { color: var(--unverified); background: var(--unverified-bg) }
.ladder { display: grid; grid-template-columns: repeat(7, 1fr); gap: 6px; padding: 0; margin: 26px 0 10px;
  list-style: none }
.ladder li { border-radius: 8px; padding: 10px 12px; min-height: 84px; border: 1px solid transparent }
.ladder b { font-size: 18px; display: block } .ladder span { display: block; font-size: 12.5px; line-height: 1.3 }
.ladder i { font-size: 11px; opacity: .75; font-style: normal }
.ladder .open { color: var(--soft); border-color: var(--line); background: none }
.next { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--pass); border-radius: 6px;
  padding: 10px 14px; margin: 0 0 26px } .next b { margin-right: 6px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  margin: 0 0 16px }
.scroll { overflow-x: auto } table { border-collapse: separate; border-spacing: 3px }
th { font-weight: 500; text-align: left; color: var(--soft); font-size: 12.5px; padding: 2px 8px; white-space: nowrap }
.matrix thead th { text-align: center } .matrix tbody th { color: var(--ink); font-size: 13.5px }
.matrix tbody th small { color: var(--soft); margin-left: 6px }
.matrix td { position: relative; min-width: 74px; height: 34px; padding: 3px 8px; border-radius: 5px;
  text-align: center; overflow: hidden; white-space: nowrap }
.matrix td b { font-weight: 600 } .matrix td small { margin-left: 6px; opacity: .8 }
.matrix td.none { background: none }
.matrix td s { position: absolute; left: 0; bottom: 0; height: 3px; background: currentColor; opacity: .55 }
details { margin-top: 8px } summary { cursor: pointer; color: var(--soft) }
.failures summary { color: var(--fail); font-weight: 500 } .failures p { margin: 4px 0 4px 14px }
pre { margin: 6px 0 10px 14px; padding: 8px 10px; border-radius: 6px; background: var(--unverified-bg);
  white-space: pre-wrap } code, pre { font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
.list { font-size: 12.5px } .list td { padding: 1px 8px; border-radius: 3px }
footer { color: var(--soft); font-size: 12.5px; margin-top: 20px }
.legend { color: var(--soft); font-size: 12.5px; margin: 0 0 16px }
@media (max-width: 720px) { .ladder { grid-template-columns: repeat(2, 1fr) } .ladder li { min-height: 0 }
  .tiles { width: 100%; gap: 6px } .tile { flex: 1; min-width: 0; padding: 8px } .tile span { font-size: 11px } }
"""
