// A rank's mail: what ranks of one machine tell each other of a region, with the file of its
// memory.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "link.h"

namespace rma {

// Closed when it goes.
class File {
 public:
  explicit File(int number = -1) : number_(number) {}
  File(File&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~File() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

struct Address {
  int process, socket;

  sockaddr_un name(socklen_t& size) const {
    sockaddr_un name = {AF_UNIX, {}};  // which begins with 0: no file has this name
    const int length =
        snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "rma-loop.%d.%d", process, socket);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    return name;
  }
};

struct Letter {
  int sender, region;
  u64 region_bytes, offset, allocation_bytes;  // the last two: of the memory in the file
};

struct Mail {
  Letter letter;
  File file;
};

class Post {
 public:
  Post() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    socklen_t size;
    const sockaddr_un name = address().name(size);
    if (bind(socket_.number(), reinterpret_cast<const sockaddr*>(&name), size) != 0) {
      socket_ = File();
    }
  }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  Address address() const { return {getpid(), socket_.number()}; }

  // Sends the letter to all others and takes theirs of the same region, by rank; collective.  Who
  // has gone, or has sent nothing after `limit_ns`, has no mail.
  std::vector<std::unique_ptr<Mail>> exchange(const std::vector<Address>& ranks,
                                              const Letter& letter, const File& file,
                                              u64 limit_ns) {
    std::vector<std::unique_ptr<Mail>> mail(ranks.size());
    std::vector<bool> is_sent(ranks.size()), is_gone(ranks.size());
    is_sent[letter.sender] = is_gone[letter.sender] = true;
    for (const u64 start = now_ns(); now_ns() - start < limit_ns;) {
      bool is_complete = true;
      // Nobody blocks while he sends: all would, once the queues of all are full.
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        if (!is_sent[rank]) {
          is_sent[rank] = send(ranks[rank], letter, file);
          is_gone[rank] = !is_sent[rank] && errno != EAGAIN && errno != ENOBUFS;
          is_sent[rank] = is_sent[rank] || is_gone[rank];
        }
        is_complete = is_complete && is_sent[rank];
      }
      while (auto got = receive()) kept_.push_back(std::move(got));
      for (auto& kept : kept_) {
        const bool is_known = static_cast<std::size_t>(kept->letter.sender) < ranks.size();
        if (kept->letter.region == letter.region && is_known) {
          mail[kept->letter.sender] = std::move(kept);
        } else if (kept->letter.region < letter.region || !is_known) {
          kept.reset();
        }
      }
      std::erase(kept_, nullptr);
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        is_complete = is_complete && (mail[rank] || is_gone[rank]);
      }
      if (is_complete) break;
      pollfd waiting = {socket_.number(), POLLIN, 0};
      poll(&waiting, 1, 1);
    }
    return mail;
  }

  // False, with `errno`: the other's queue is full, or it has gone.
  bool send(const Address& to, const Letter& letter, const File& file) const {
    socklen_t size;
    sockaddr_un name = to.name(size);
    iovec text = {const_cast<Letter*>(&letter), sizeof(letter)};
    msghdr message = {};
    message.msg_name = &name;
    message.msg_namelen = size;
    message.msg_iov = &text;
    message.msg_iovlen = 1;
    Control control = {};
    if (file) {
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof(control.bytes);
      control.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
      const int number = file.number();
      memcpy(CMSG_DATA(&control.head), &number, sizeof(number));
    }
    return sendmsg(socket_.number(), &message, MSG_NOSIGNAL) == sizeof(letter);
  }

  // Null: there is none.
  std::unique_ptr<Mail> receive() const {
    auto mail = std::make_unique<Mail>();
    iovec text = {&mail->letter, sizeof(Letter)};
    Control control = {};
    msghdr message = {};
    message.msg_iov = &text;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    if (recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC) != sizeof(Letter)) return nullptr;
    if (const cmsghdr* head = CMSG_FIRSTHDR(&message)) {
      int number;
      memcpy(&number, CMSG_DATA(head), sizeof(number));
      mail->file = File(number);
    }
    return mail;
  }

 private:
  // Room for one file in a message.
  union Control {
    cmsghdr head;
    char bytes[CMSG_SPACE(sizeof(int))];
  };

  File socket_;
  std::deque<std::unique_ptr<Mail>> kept_;  // of regions to come
};

}  // namespace rma
