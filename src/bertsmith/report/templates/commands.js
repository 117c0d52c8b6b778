for (const button of document.querySelectorAll(".command button")) {
  if (!navigator.clipboard) { button.hidden = true; continue; }
  button.onclick = async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
}
