"""Started programs, as an agent with an executables grant starts them."""

import asyncio
import subprocess

print(subprocess.run(["/usr/bin/echo", "one"], capture_output=True, text=True, check=True).stdout.strip())


async def main() -> None:
    child = await asyncio.create_subprocess_exec("/usr/bin/echo", "two", stdout=asyncio.subprocess.PIPE)
    print((await child.communicate())[0].decode().strip())


asyncio.run(main())
print("done")
