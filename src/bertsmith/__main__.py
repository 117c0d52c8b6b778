"""`python -m bertsmith`, which `accelerate launch -m bertsmith …` runs on every process."""

from bertsmith.cli import main

if __name__ == "__main__":
    main()
