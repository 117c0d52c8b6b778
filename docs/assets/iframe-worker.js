/* Search without a server: browsers refuse workers from file:// pages, so run the search worker in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        window.addEventListener("message", (event) => {
          if (event.source !== frame.contentWindow) return;
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        });
        frame.srcdoc = `<script>
          self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
            const script = document.createElement("script");
            script.src = url; script.onload = done; script.onerror = failed;
            document.head.appendChild(script);
          })), Promise.resolve());
          self.postMessage = (data) => parent.postMessage(data, "*");
        <\/script><script src="${url}"><\/script>`;
        frame.onload = () => resolve(frame.contentWindow);
      });
      document.body.appendChild(frame);
    }
    postMessage(data) {
      this.ready.then((target) => target.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
