// Draws the links between the words of a line and those of its translation.
customElements.get("word-links") || customElements.define("word-links", class extends HTMLElement {
  connectedCallback() {
    const namespace = "http://www.w3.org/2000/svg";
    this.drawing = document.createElementNS(namespace, "svg");
    this.drawing.setAttribute("aria-hidden", "true");
    this.append(this.drawing);
    const [source, target] = this.querySelectorAll("ul");
    this.words = [[...source.children], [...target.children]];
    this.links = this.words[1].flatMap((word, place) =>
      word.dataset.links.split(" ").filter(Boolean).map(other => {
        const path = document.createElementNS(namespace, "path");
        this.drawing.append(path);
        return { path, ends: [this.words[0][Number(other)], word] };
      }));
    for (const word of this.words.flat()) {
      for (const event of ["pointerenter", "focus"]) {
        word.addEventListener(event, () => this.follow(word));
      }
      for (const event of ["pointerleave", "blur"]) {
        word.addEventListener(event, () => this.follow(null));
      }
    }
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this);
  }

  disconnectedCallback() {
    this.observer.disconnect();
    this.drawing.remove();
  }

  draw() {
    const frame = this.getBoundingClientRect();
    for (const { path, ends } of this.links) {
      const [above, below] = ends.map(word => word.getBoundingClientRect());
      const [x, y] = [above.x + above.width / 2 - frame.x, above.bottom - frame.y];
      const [u, v] = [below.x + below.width / 2 - frame.x, below.top - frame.y];
      const middle = (y + v) / 2;
      path.setAttribute("d", `M${x} ${y}C${x} ${middle} ${u} ${middle} ${u} ${v}`);
    }
  }

  follow(word) {
    this.classList.toggle("following", word !== null);
    for (const one of this.words.flat()) one.classList.remove("followed");
    for (const { path, ends } of this.links) {
      const followed = ends.includes(word);
      path.classList.toggle("followed", followed);
      if (followed) for (const end of ends) end.classList.add("followed");
    }
    word?.classList.add("followed");
  }
});

// What is typed runs in the direction of its own script, and screen readers hear what comes of it.
new MutationObserver(() => {
  for (const id of ["vt-status", "vt-progress"]) {
    const place = document.getElementById(id);
    if (place?.role !== "status") place?.setAttribute("role", "status");
  }
  for (const field of document.querySelectorAll("textarea:not([dir=auto])")) {
    field.dir = "auto";
    // Gradio leaves fields that show results without a name.
    const name = field.closest(".block")?.querySelector("[data-testid=block-info]")?.textContent;
    if (name && !field.labels.length) field.ariaLabel = name.trim();
  }
}).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ["dir"] });
