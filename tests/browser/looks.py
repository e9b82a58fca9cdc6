"""What is wrong with the looks of a page: found by axe-core and by measuring."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

AXE = Axe()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
NEWLY = ["color-contrast", "target-size", "scrollable-region-focusable"]
"""What another width or color scheme can break: the others are about the markup."""
VIOLATIONS = """async (rules) => {
  const include = ['h1', '.messagelist', '.mq-page'].filter((one) => document.querySelector(one));
  const options = { runOnly: rules, resultTypes: ['violations'], preload: false, iframes: false };
  const told = (rule) => rule.nodes.map((one) => `${rule.id}: ${one.target} ${one.failureSummary}`);
  // Further rows are like these, and axe takes its time for each.
  const sheet = new CSSStyleSheet();
  sheet.replaceSync('.mq-table tbody tr:nth-child(n + 7) { display: none; }');
  document.adoptedStyleSheets.push(sheet);
  const found = await axe.run({ include }, options);
  document.adoptedStyleSheets.pop();
  return found.violations.flatMap(told);
}"""
PREPARE = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync('* { transition: none !important; }');
  document.adoptedStyleSheets = [sheet];
  for (const one of document.querySelectorAll('details')) one.open = true;
}"""
"""Opens all details. The admin's links change their colors slowly."""
OVERFLOWING = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll('body *')].filter((one) => {
    const { left, right } = one.getBoundingClientRect();
    return (left < -1 || right > innerWidth + 1) && !one.closest('.mq-scroll, .results, pre');
  }).map((one) => `too wide: ${one.outerHTML.slice(0, 120)}`)"""


def faults(page: Page, *, first: str = "light") -> list[str]:
    """What is wrong with the page on a screen and on a phone, in the light and in the dark, with all details open.

    Names, labels, roles, contrasts (WCAG A and AA), and whether it scrolls to the side. It is loaded only once.

    Args:
        page: the page.
        first: the color scheme of the screen. That of the phone is the other one. With "dark", only what colors and
            widths can break is looked for: for pages whose markup has been looked at.
    """
    page.evaluate(AXE.axe_script)
    page.evaluate(PREPARE)
    found = []
    screen, phone = (("light", RULES), ("dark", NEWLY)) if first == "light" else (("dark", NEWLY), ("light", NEWLY))
    for width, (scheme, rules) in ((1280, screen), (390, phone)):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        told = [*page.evaluate(VIOLATIONS, rules), *page.evaluate(OVERFLOWING)]
        found += [f"{width}, {scheme}: {one}" for one in told]
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = false; })")
    return found


TITLES = "() => [...document.querySelectorAll('.mq-page [title]')].map((one) => `only for a mouse: ${one.title}`)"
"""A title is shown to the mouse only. Those of charts are in a table, a label or the crosshair, too."""
RED = """() => [...document.querySelectorAll('.mq-page :is([href*="/do/"], [formaction], [name="confirmed"])')].map(
  (one) => [(one.href || one.formAction).split('/do/')[1].split('/')[0],
    ['rgb(186, 33, 33)', 'rgb(179, 38, 30)', 'rgb(255, 138, 128)'].includes(
      getComputedStyle(one)[one.matches('.button, input') ? 'backgroundColor' : 'color'])])"""
"""The operations to which links and buttons lead, and whether these are red, as what deletes in the admin."""
MIRRORED = """() => [
  ...[...document.querySelectorAll('.mq-page :is(pre, textarea, .mq-chart, .mq-cause-error code)')]
    .filter((one) => getComputedStyle(one).direction !== 'ltr'),
  ...[...document.querySelectorAll('.mq-legend .mq-key')].filter((one) => !one.closest('bdi, li')),
].map((one) => `mirrored: ${one.outerHTML.slice(0, 120)}`)"""
DISORDERED = r"""() => {
  const unit = '(ms|s|min|h|d)\\b';
  const patterns = [
    '\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d(:\\d\\d)?', '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}',
    `([≤>] )?\\d+ ${unit}( \\d+ ${unit})?`, `[\\d.,]+/${unit}`, '\\d[\\d,]*\\+', '\\d+%', '[\\d*]+( [\\d*]+){4}',
  ];
  const any = new RegExp(patterns.join('|'), 'g');
  const range = document.createRange();
  const texts = document.createTreeWalker(document.querySelector('.mq-page'), NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) for (const match of texts.currentNode.data.matchAll(any)) {
    const [first, last] = [match.index, match.index + match[0].length - 1].map((place) => {
      range.setStart(texts.currentNode, place);
      range.setEnd(texts.currentNode, place + 1);
      return range.getBoundingClientRect();
    });
    if (first.width && first.top === last.top && first.left > last.left)
      found.push(`disordered: ${match[0]} in ${texts.currentNode.parentElement.outerHTML.slice(0, 120)}`);
  }
  return found;
}"""
"""Times, ids, numbers with a unit, and cron lines whose end is on the left of their beginning."""


BUSY = """() => {
  const large = ['watermark', 'position', 'end of the log', 'oldest unsettled message', 'offset', 'dead letter'];
  for (const table of document.querySelectorAll('#mq-live table')) {
    const heads = [...table.tHead.rows[0].cells].map((one) => one.textContent.trim());
    for (const row of table.tBodies[0].rows) for (const [place, cell] of [...row.cells].entries()) {
      const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      while (texts.nextNode()) {
        if (!/^[0-9,]+$/.test(texts.currentNode.data.trim())) continue;
        texts.currentNode.data = large.includes(heads[place]) ? '123,456,789' : '10,000+';
      }
    }
  }
  for (const one of document.querySelectorAll('.mq-card dd')) (one.firstElementChild || one).textContent = '1,990,000+';
}"""
"""The numbers of a busy queue."""
CUT_OFF = """() => [...document.querySelectorAll('html, .mq-page, .mq-scroll, .mq-cards, .mq-card dd')]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => `${one.tagName} ${one.className} ${one.scrollWidth} > ${one.clientWidth}`)"""
