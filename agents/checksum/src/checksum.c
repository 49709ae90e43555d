/*
 * checksum: CRC-32 and FNV-1a of the intent's text, with its length in bytes of UTF-8.
 *
 * One JSON line in on stdin, one JSON line out on stdout. Whoever writes the line is not trusted: everything is
 * bounded, a line that is not one JSON object with a string "text" ends with status 1 and a word on stderr. The line
 * is read once into a fixed buffer; strings are unescaped in place, since an escape is never shorter than what it says.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_BYTES = 4 << 20, DEPTH = 64, SHOWN_BYTES = 48 };

static unsigned char line[LINE_BYTES];

/* What is left of the line. `end` is one past its last byte. */
struct reader {
    unsigned char *at;
    const unsigned char *end;
};

struct text {
    const unsigned char *bytes;
    size_t length;
};

static _Noreturn void fail(const char *why)
{
    fprintf(stderr, "checksum: %s\n", why);
    exit(1);
}

static size_t read_line(void)
{
    size_t filled = 0;
    for (;;) {
        if (filled == sizeof line)
            fail("the line is too long");
        ssize_t count = read(STDIN_FILENO, line + filled, sizeof line - filled);
        if (count < 0)
            fail("stdin cannot be read");
        const unsigned char *newline = count ? memchr(line + filled, '\n', (size_t)count) : NULL;
        if (newline)
            return (size_t)(newline - line);
        if (count == 0)
            return filled;
        filled += (size_t)count;
    }
}

static void skip_space(struct reader *in)
{
    while (in->at < in->end && (*in->at == ' ' || *in->at == '\t' || *in->at == '\r'))
        in->at++;
}

static unsigned char next(struct reader *in)
{
    if (in->at == in->end)
        fail("the line ends too early");
    return *in->at++;
}

static void expect(struct reader *in, unsigned char wanted)
{
    skip_space(in);
    if (next(in) != wanted)
        fail("the line is not a JSON object");
}

static unsigned hex4(struct reader *in)
{
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char c = next(in);
        unsigned digit;
        if (c >= '0' && c <= '9')
            digit = c - '0';
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            digit = (c | 0x20) - 'a' + 10u;
        else
            fail("an escape is not hexadecimal");
        value = value << 4 | digit;
    }
    return value;
}

/* The code point of \uXXXX, whose u was read. Half a surrogate pair is U+FFFD: UTF-8 has no form for it. */
static uint32_t unicode_escape(struct reader *in)
{
    uint32_t unit = hex4(in);
    if (unit < 0xD800 || unit > 0xDFFF)
        return unit;
    if (unit > 0xDBFF || in->end - in->at < 6 || in->at[0] != '\\' || in->at[1] != 'u')
        return 0xFFFD;
    struct reader ahead = {in->at + 2, in->end};
    uint32_t low = hex4(&ahead);
    if (low < 0xDC00 || low > 0xDFFF)
        return 0xFFFD; /* the second escape stands for itself */
    in->at = ahead.at;
    return 0x10000 + ((unit - 0xD800) << 10 | (low - 0xDC00));
}

static unsigned char *put_utf8(unsigned char *out, uint32_t c)
{
    if (c < 0x80) {
        *out++ = (unsigned char)c;
    } else if (c < 0x800) {
        *out++ = (unsigned char)(0xC0 | c >> 6);
        *out++ = (unsigned char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        *out++ = (unsigned char)(0xE0 | c >> 12);
        *out++ = (unsigned char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (unsigned char)(0x80 | (c & 0x3F));
    } else {
        *out++ = (unsigned char)(0xF0 | c >> 18);
        *out++ = (unsigned char)(0x80 | (c >> 12 & 0x3F));
        *out++ = (unsigned char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (unsigned char)(0x80 | (c & 0x3F));
    }
    return out;
}

/*
 * A string whose opening quote was read, unescaped in place. INVARIANT: `out` never passes `in->at`: the shortest
 * escape for n bytes of UTF-8 has more than n bytes (\n: 2 for 1, \uXXXX: 6 for 3, a pair: 12 for 4).
 */
static struct text string(struct reader *in)
{
    static const char names[] = "\"\\/bfnrt";
    static const char values[] = "\"\\/\b\f\n\r\t";
    unsigned char *start = in->at, *out = in->at;
    for (;;) {
        unsigned char c = next(in);
        if (c == '"')
            return (struct text){start, (size_t)(out - start)};
        if (c < 0x20)
            fail("a string holds a control character");
        if (c == '\\') {
            c = next(in);
            const char *name = c ? strchr(names, c) : NULL;
            if (name)
                *out++ = (unsigned char)values[name - names];
            else if (c == 'u')
                out = put_utf8(out, unicode_escape(in));
            else
                fail("an escape is unknown");
        } else {
            *out++ = c;
        }
    }
}

static void skip_value(struct reader *in, int depth);

/* The rest of an array or object whose opening bracket was read. */
static void skip_nested(struct reader *in, unsigned char close, int depth)
{
    skip_space(in);
    if (in->at < in->end && *in->at == close) {
        in->at++;
        return;
    }
    for (;;) {
        if (close == '}') {
            expect(in, '"');
            string(in);
            expect(in, ':');
        }
        skip_value(in, depth + 1);
        skip_space(in);
        unsigned char c = next(in);
        if (c == close)
            return;
        if (c != ',')
            fail("a list is not well formed");
    }
}

static void skip_value(struct reader *in, int depth)
{
    if (depth > DEPTH)
        fail("the line is nested too deeply");
    skip_space(in);
    unsigned char c = next(in);
    if (c == '"') {
        string(in);
    } else if (c == '{' || c == '[') {
        skip_nested(in, c == '{' ? '}' : ']', depth);
    } else if (c != '\0' && strchr("-0123456789tfn", c)) {
        /* Numbers, true, false, null: which one does not matter here, only where it ends. */
        while (in->at < in->end && *in->at != '\0' && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *in->at))
            in->at++;
    } else {
        fail("a value is not well formed");
    }
}

/* The last string called "text" of the line's object: a repeated name counts as in every common JSON reader. */
static struct text find_text(struct reader *in)
{
    struct text found = {NULL, 0};
    expect(in, '{');
    skip_space(in);
    if (in->at < in->end && *in->at == '}')
        fail("the intent has no text");
    for (;;) {
        expect(in, '"');
        struct text name = string(in);
        expect(in, ':');
        skip_space(in);
        if (name.length == 4 && memcmp(name.bytes, "text", 4) == 0) {
            expect(in, '"');
            found = string(in);
        } else {
            skip_value(in, 0);
        }
        skip_space(in);
        unsigned char c = next(in);
        if (c == '}')
            break;
        if (c != ',')
            fail("the line is not a JSON object");
    }
    skip_space(in);
    if (in->at != in->end)
        fail("something follows the object");
    if (!found.bytes)
        fail("the intent has no text");
    return found;
}

/* CRC-32 as in zlib, bit by bit: a table would be longer than the agent. */
static uint32_t crc32(struct text text)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < text.length; i++) {
        crc ^= text.bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static uint64_t fnv1a(struct text text)
{
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < text.length; i++)
        hash = (hash ^ text.bytes[i]) * 0x100000001B3u;
    return hash;
}

/* The beginning of the text inside a JSON string. Bytes that are not ASCII are left out, so that none is cut in two. */
static void put_escaped(struct text text)
{
    size_t shown = text.length < SHOWN_BYTES ? text.length : SHOWN_BYTES;
    for (size_t i = 0; i < shown; i++) {
        unsigned char c = text.bytes[i];
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20 || c == 0x7F)
            printf("\\u%04x", c);
        else if (c < 0x80)
            putchar(c);
        else if (c >= 0xC0)
            putchar('?');
    }
    if (shown < text.length)
        fputs("...", stdout);
}

int main(void)
{
    struct reader in = {line, line + read_line()};
    struct text text = find_text(&in);
    fputs("{\"text\": \"crc32 ", stdout);
    printf("%08x, fnv1a %016llx, %zu bytes: ", crc32(text), (unsigned long long)fnv1a(text), text.length);
    put_escaped(text);
    fputs("\", \"sources\": []}\n", stdout);
    if (fflush(stdout) != 0)
        fail("stdout cannot be written");
    return 0;
}
